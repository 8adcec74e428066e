"""A study from file to page, killed on the way."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
STUDY: dict[str, Any] = {
    "title": "Killed",
    "config": "examples/configs/quickstart.yaml",
    "set": {
        "run.steps": 2,
        "run.eval_every": 1,
        "eval.num_problems": 4,
        "data.prompts_per_step": 4,
        "checkpoint.every": 1,
    },
    "eval": {"benchmarks": "arithmetic", "limit": 8, "samples": 2, "max_tokens": 64},
    "baseline": "base",
    "sections": {
        "methods": {
            "title": "Methods",
            "runs": {
                "base": {"train": False},
                "ours": {},
            },
        }
    },
}
_TIMES = re.compile(r'"seconds": [^,]*|"converged_seconds": [^,]*|"phases": \{[^}]*\}')


def start(study: Path, out: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "megatron_opsft", "study", study, "--out", out]
    return subprocess.Popen(
        words, cwd=ROOT, text=True, stdout=subprocess.PIPE, start_new_session=True
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 240
    while not path.exists():
        assert process.poll() is None and time.monotonic() < until, f"{path} never came"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_killed_study_gives_the_same_table_and_leaves_no_process(tmp_path: Path) -> None:
    study = tmp_path / "study.yaml"
    study.write_text(yaml.safe_dump(STUDY, sort_keys=False))
    out = tmp_path / "out"
    killed = start(study, out)
    wait_for(out / "runs/ours-s0/train/metrics.jsonl", killed)
    os.kill(killed.pid, signal.SIGKILL)  # it alone: what it started must see that by itself
    killed.wait()
    assert not (out / "table.json").exists()
    ended = start(study, out)
    assert "report.html" in ended.communicate(timeout=300)[0] and ended.returncode == 0
    table = (out / "table.json").read_text()
    rows = {row["name"]: row for row in json.loads(table)}
    assert list(rows) == ["base", "ours"]
    assert all(row["error"] is None and 0 <= row["accuracy"] <= 1 for row in rows.values())
    assert rows["base"]["compression_ratio"] == 1.0 and rows["ours"]["method"] == "on_policy_sft"
    assert rows["ours"]["training"]["steps"] == 2 and rows["ours"]["seconds"] > 0

    undisturbed = start(study, tmp_path / "again")
    assert undisturbed.wait(timeout=300) == 0
    again = (tmp_path / "again/table.json").read_text()
    assert _TIMES.sub("", again) == _TIMES.sub("", table) != table
