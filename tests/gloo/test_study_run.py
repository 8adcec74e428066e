"""The quick study of examples/paper.sh, with fewer steps: from file to page, killed on the way."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
QUICK = ROOT / "examples/studies/tiny_quick.yaml"
KEPT = {"methods": ("CoT", "On-policy SFT"), "aggregation": ("M, the longest accepted",)}
STEPS = {"run.steps": 2, "run.eval_every": 1, "checkpoint.every": 1}
SIZES = {"eval.num_problems": 4, "data.prompts_per_step": 4}
_TIMES = re.compile(r'"(converged_)?seconds": [^,]*|"peak_memory_bytes": [^,]*|"phases": \{[^}]*\}')


def short_study(path: Path) -> Path:
    """The quick one of few runs, each of few steps."""
    study = yaml.safe_load(QUICK.read_text(encoding="utf-8"))
    study["set"] |= STEPS | SIZES
    study["eval"] |= {"limit": 8, "samples": 2, "max_tokens": 64}
    sections = study["sections"]
    for key, names in KEPT.items():
        sections[key]["runs"] = {name: sections[key]["runs"][name] for name in names}
    path.write_text(yaml.safe_dump(study, sort_keys=False))
    return path


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
    study = short_study(tmp_path / "study.yaml")
    out = tmp_path / "out"
    killed = start(study, out)
    wait_for(out / "runs/On_policy_SFT-s0/train/metrics.jsonl", killed)
    os.kill(killed.pid, signal.SIGKILL)  # it alone: what it started must see that by itself
    killed.wait()
    assert not (out / "table.json").exists()
    ended = start(study, out)
    assert "report.html" in ended.communicate(timeout=300)[0] and ended.returncode == 0
    table = (out / "table.json").read_text()
    rows = {row["name"]: row for row in json.loads(table)}
    assert list(rows) == ["CoT", "On-policy SFT", "M, the longest accepted"]
    assert all(row["error"] is None and 0 <= row["accuracy"] <= 1 for row in rows.values())
    base, ours, shared = rows.values()
    assert base["compression_ratio"] == 1.0 and ours["method"] == "on_policy_sft"
    assert ours["training"]["steps"] == 2 and ours["seconds"] > 0
    assert ours["training"]["peak_memory_bytes"] > 10**8  # PyTorch alone is more
    assert ours["budgets"][-1]["accuracy"] == ours["accuracy"]
    assert shared["directory"] == ours["directory"]

    undisturbed = start(study, tmp_path / "again")
    assert undisturbed.wait(timeout=300) == 0
    again = (tmp_path / "again/table.json").read_text()
    assert _TIMES.sub("", again) == _TIMES.sub("", table) != table
