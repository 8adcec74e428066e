"""`complete.json`: what was written is read, and nothing that was changed since."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_opsft.model.checkpoint_manifest import read_manifest, sealed

WRITTEN = {
    "step": 3,
    "config_hash": "abc",
    "method_state": {"step": 4, "levels": {7: 0.1}, "share": float("nan")},
    "files": {"common.pt": [10, 5]},
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "step_000003"
    path.mkdir()
    (path / "complete.json").write_bytes(sealed(WRITTEN))
    return path


def test_what_was_written_is_read(checkpoint: Path) -> None:
    assert json.dumps(read_manifest(checkpoint)) == json.dumps(WRITTEN)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["method_state"].update(step=400),
        lambda content: content.pop("checksum"),
        lambda content: content.update(added=1),
    ],
)
def test_what_was_changed_is_damaged(
    checkpoint: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    file = checkpoint / "complete.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    assert read_manifest(checkpoint) == f"checkpoint file {file} is damaged"
