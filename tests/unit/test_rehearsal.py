"""tools/rehearse.py runs on small jobs as on large ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from forked_cli import ROOT

PARTS = ["facts of responses", "packing", "tokens to the replica"]
PARTS += ["who holds what", "schedule of a push"]


@pytest.mark.slow
def test_every_part_is_rehearsed(tmp_path: Path) -> None:
    """Of a small mixture on 4 and on 8 ranks, four of which share its experts."""
    large = ROOT / "megatron_opsft/assets/model_configs/Qwen/Qwen3-30B-A3B/config.json"
    small = {"num_hidden_layers": 2, "num_experts": 8, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(json.loads(large.read_text()) | small))
    command = [sys.executable, ROOT / "tools/rehearse.py"]
    command += [ROOT / "examples/configs/quickstart.yaml", f"model.path={tmp_path}"]
    command += ["rollout.engine=vllm", "parallel.tp=2", "parallel.sequence_parallel=true"]
    command += ["parallel.ep=4", "parallel.etp=1", "--ranks", "4", "8", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in ended.stdout.splitlines()]
    found = [(row["ranks"], row["part"]) for row in rows]
    assert found == [(ranks, part) for ranks in (4, 8) for part in PARTS]
    assert all(row["seconds"] >= 0 and row["bytes"] > 0 for row in rows)
