"""The study of examples/paper.sh --quick, from file to page."""

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

ROOT = Path(__file__).parents[2]
QUICK = ROOT / "examples/studies/tiny_quick.yaml"
_TIMES = re.compile(r'"(converged_)?seconds": [^,]*|"peak_memory_bytes": [^,]*|"phases": \{[^}]*\}')


def start(out: Path, *options: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "megatron_opsft", "study", QUICK, "--out", out, *options]
    return subprocess.Popen(
        words, cwd=ROOT, text=True, stdout=subprocess.PIPE, start_new_session=True
    )


def wait_for_step(path: Path, step: int, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 240
    while not path.exists() or path.read_text().count("\n") < step:
        assert process.poll() is None and time.monotonic() < until, f"{path}: no step {step}"
        time.sleep(0.02)


def rows_of(out: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads((out / "table.json").read_text())}


@pytest.mark.slow
def test_the_quick_study_of_the_paper_killed_on_its_way(tmp_path: Path) -> None:
    """Its claims hold, and the run that was killed is that of an undisturbed study."""
    out = tmp_path / "out"
    killed = start(out)
    wait_for_step(out / "runs/On_policy_SFT-s0/train/metrics.jsonl", 6, killed)
    os.kill(killed.pid, signal.SIGKILL)  # it alone: what it started must see that by itself
    killed.wait()
    assert not (out / "table.json").exists()
    ended = start(out)
    assert "report.html" in ended.communicate(timeout=500)[0] and ended.returncode == 0
    page = (out / "report.html").read_text()
    assert page.count("<td>yes</td>") == 2 and "<td>no</td>" not in page
    rows = rows_of(out)
    assert all(row["error"] is None and 0 <= row["accuracy"] <= 1 for row in rows.values())
    base, ours, shared = rows["CoT"], rows["On-policy SFT"], rows["M, the longest accepted"]
    assert base["compression_ratio"] == 1.0 and ours["compression_ratio"] < 0.5
    assert rows["CoD"]["tokens"] > ours["tokens"] and rows["GRPO"]["method"] == "grpo"
    assert ours["training"]["steps"] == 12 and ours["seconds"] > 0
    assert ours["training"]["peak_memory_bytes"] > 10**8  # PyTorch alone is more
    assert ours["budgets"][-1]["accuracy"] == ours["accuracy"]
    assert shared["directory"] == ours["directory"]

    undisturbed = start(tmp_path / "again", "--only", "2")  # the one that was killed
    assert undisturbed.wait(timeout=300) == 0
    again = rows_of(tmp_path / "again")
    assert again["CoT"]["error"] == again["each response's length"]["error"] == "not made yet"
    for name in ("On-policy SFT", "M, the longest accepted"):
        assert without_times(again[name]) == without_times(rows[name]), name


def without_times(row: dict[str, Any]) -> str:
    """Nor the ratio to a baseline, which one of the studies has not made."""
    return _TIMES.sub("", json.dumps(row | {"compression_ratio": None}))
