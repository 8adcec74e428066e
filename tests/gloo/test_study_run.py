"""The study of examples/paper.sh --quick, from file to page."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked_cli import ROOT, ForkedCli
from processes import wait_until
from run_differences import read_lines

QUICK = ROOT / "examples/studies/tiny_quick.yaml"


def rows_of(out: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads((out / "table.json").read_text())}


def shortened(directory: Path) -> Path:
    """The study's untrained model, on-policy SFT in steps half as large, and a variant in fewer and
    smaller ones; evaluated on an eighth as many samples.
    """
    tree = yaml.safe_load(QUICK.read_text())
    tree["eval"] |= {"limit": 24, "samples": 2}
    tree["set"] |= {"run.eval_every": 12, "eval.num_problems": 8, "data.prompts_per_step": 8}
    methods, divisors = (tree["sections"][name]["runs"] for name in ("methods", "aggregation"))
    del methods["CoD"], methods["GRPO"], methods["CRST"]
    variant = divisors["each response's length"]
    variant["set"] |= {"run.steps": 6, "run.eval_every": 0, "checkpoint.every": 2}
    variant["set"] |= {"data.prompts_per_step": 4}
    variant["eval"] = {"limit": 8}
    (directory / "study.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    return directory / "study.yaml"


@pytest.mark.slow
def test_the_quick_study_of_the_paper_killed_on_its_way(cli: ForkedCli, tmp_path: Path) -> None:
    """Runs that were finished are not made again, and the one that was not goes on (that it is then
    an undisturbed run's equal: test_end_to_end). Answers become short and stay correct.
    """
    study, out = shortened(tmp_path), tmp_path / "out"
    words = ["study", study, "--out", out, "--jobs", "2"]
    killed = cli.start(words)
    under_way = out / "runs/each_response_s_length-s0/train/metrics.jsonl"
    wait_until(lambda: len(read_lines(under_way)) > 2, 240)
    os.kill(killed.pid, signal.SIGKILL)  # it alone: what it started must see that by itself
    killed.wait()
    assert not (out / "table.json").exists()
    finished = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/eval/results.json")}
    assert finished
    ended = cli.start(words).wait(500)
    assert ended.exit_code == 0 and "report.html" in ended.stdout, ended.stderr
    assert finished == {path: path.stat().st_mtime_ns for path in finished}
    page = (out / "report.html").read_text()
    assert "On-policy SFT" in page
    rows = rows_of(out)
    assert all(row["error"] is None for row in rows.values())
    accuracy, ratio = (
        {name: row["metrics"][metric]["value"] for name, row in rows.items()}
        for metric in ("accuracy", "compression_ratio")
    )
    ours, shared = rows["On-policy SFT"], rows["M, the longest accepted"]
    assert ratio["CoT"] == 1.0 and ratio["On-policy SFT"] < 0.5
    assert accuracy["On-policy SFT"] > accuracy["CoT"] - 0.02
    assert ours["training"]["steps"] == 12 and ours["training"]["seconds"] > 0
    assert ours["training"]["peak_memory_bytes"] > 10**8  # PyTorch alone is more
    assert ours["budgets"][-1][1]["accuracy"] == ours["metrics"]["accuracy"]
    assert shared["directory"] == ours["directory"]
    assert rows["each response's length"]["training"]["steps"] == 6
