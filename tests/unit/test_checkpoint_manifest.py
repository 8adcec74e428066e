"""`complete.json`: what was written is read, and nothing that was changed since."""

import json
from pathlib import Path

from megatron_opsft.model.checkpoint_write import read_manifest, sealed

WRITTEN = {
    "step": 3,
    "config_hash": "abc",
    "method_state": {"step": 4, "levels": {7: 0.1}, "share": float("nan")},
    "files": {"common.pt": [10, 5]},
}


def test_what_was_written_is_read_and_what_was_changed_is_damaged(tmp_path: Path) -> None:
    directory = tmp_path / "step_000003"
    directory.mkdir()
    file = directory / "complete.json"
    file.write_bytes(sealed(WRITTEN))
    assert json.dumps(read_manifest(directory)) == json.dumps(WRITTEN)
    content = json.loads(file.read_text())
    unsealed = {key: value for key, value in content.items() if key != "checksum"}
    for changed in (content | {"config_hash": "abd"}, content | {"added": 1}, unsealed):
        file.write_text(json.dumps(changed))
        assert read_manifest(directory) == f"checkpoint file {file} is damaged"
