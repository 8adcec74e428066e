"""Every method trains the tiny reasoner: its rewards are the formula's, and killed runs resume."""

import gzip
import json
import math
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
from forked_cli import ROOT, ForkedCli
from small_run import QUICKSTART, SMALL_RUN

from megatron_opsft.methods.catalog import METHODS
from megatron_opsft.report.differences import compare_runs

LIMIT = 64
# What a run of this size needs; lengths here are some dozens of tokens, not thousands.
TARGETS = ["method.lowest_target=16", "method.highest_target=64", "method.target_step=16"]
MONITOR = [*TARGETS, "method.monitor_problems=3", "method.monitor_every=2"]
KEYS: dict[str, list[str]] = {
    "on_policy_sft": [],
    "grpo": ["method.beta=0.04", "method.updates_per_batch=2"],
    "dr_grpo": [],
    "thinkprune": ["method.limits=64,40", "method.stage_steps=1", "method.beta=0.04"],
    "o1_pruner": [],
    "l1_exact": ["method.lowest_target=8", "method.highest_target=60"],
    "l1_max": ["method.lowest_target=8", "method.highest_target=60"],
    "er_rl": [],
    "laser": ["method.target=40"],
    "laser_d": MONITOR,
    "laser_de": MONITOR,
    "kimi": ["method.updates_per_batch=2"],
    "mastery_gated": [],
    "dler": ["method.max_refills=2"],
    "gdpo": ["method.target=40"],
    "ddca": [],
    "short_rl": [],
    "a_dlp": ["method.reference_accuracy=0.5"],
    "smart_thinker": [],
    "linear": [],
}
KILLED = ["thinkprune", "laser_d", "a_dlp"]  # a reference that is replaced, and two kinds of state
STEPS = [
    *SMALL_RUN,
    "run.steps=3",
    "data.prompts_per_step=2",
    "eval.num_problems=1",
    "checkpoint.every=1",
    "checkpoint.asynchronous=false",
]
DIE_AFTER_STEP_2 = """
import os, signal
from megatron_opsft.run.recorder import RunRecorder
save = RunRecorder.checkpoint
def checkpoint(self, step, **how):
    save(self, step, **how)
    if step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
RunRecorder.checkpoint = checkpoint
"""


def command(name: str, run_dir: Path) -> list[str]:
    keys = [f"method.name={name}", *KEYS[name], f"run.dir={run_dir}"]
    if name == "o1_pruner":
        problems = (ROOT / "tests/data/train.jsonl").read_text().splitlines()
        lines = [
            {"problem_id": json.loads(p)["id"], "mean_tokens": 50, "accuracy": 0.75}
            for p in problems
        ]
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        file = run_dir.parent / "references.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        keys.append(f"method.references={file}")
    return ["train", QUICKSTART, *STEPS, *keys]


def groups_of_step(run_dir: Path, step: int) -> list[list[dict[str, Any]]]:
    text = gzip.decompress((run_dir / f"rollouts/step_{step:06d}.jsonl.gz").read_bytes()).decode()
    rows = [json.loads(line) for line in text.splitlines()]
    return [list(rows) for _, rows in groupby(rows, key=lambda row: row["problem_id"])]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def er_rl(n: list[int], c: list[int]) -> list[float]:
    correct = [length for length, right in zip(n, c, strict=True) if right] or [0]
    mean, std = fmean(correct), pstdev(correct) + 1e-7
    return [r * (1 - 0.1 * sigmoid((x - mean) / std)) for x, r in zip(n, c, strict=True)]


def kimi(n: list[int], c: list[int]) -> list[float]:
    if max(n) == min(n):
        return [float(r) for r in c]
    scores = [0.5 - (x - min(n)) / (max(n) - min(n)) for x in n]
    return [1 + s if r else min(0.0, s) for s, r in zip(scores, c, strict=True)]


# (lengths, verdicts) of a group -> rewards; what is cut off has no verdict, and is wrong.
BY_FORMULA: dict[str, Callable[[list[int], list[int]], list[float]]] = {
    "on_policy_sft": lambda n, c: [float(r) for r in c],
    "grpo": lambda n, c: [float(r) for r in c],
    "dr_grpo": lambda n, c: [float(r) for r in c],
    "thinkprune": lambda n, c: [float(r) for r in c],
    "o1_pruner": lambda n, c: [50 / x - 1 + 2 * (r - 0.75) for x, r in zip(n, c, strict=True)],
    "er_rl": er_rl,
    "kimi": kimi,
    "linear": lambda n, c: [r - 0.25 * fmean(c) * x / max(n) for x, r in zip(n, c, strict=True)],
}


@pytest.mark.parametrize("name", KEYS)
def test_every_method_trains_and_is_rewarded_by_its_formula(
    cli: ForkedCli, tmp_path: Path, name: str
) -> None:
    run_dir = tmp_path / "whole"
    ended = cli.run(command(name, run_dir))
    assert ended.exit_code == 0, ended.stderr
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    groups = groups_of_step(run_dir, 1)
    rewards = [row["reward"] for group in groups for row in group]
    assert lines[0]["reward_mean"] == pytest.approx(fmean(rewards), abs=1e-12)
    assert lines[0]["reward_std"] == pytest.approx(pstdev(rewards), abs=1e-9)
    for group in groups if name in BY_FORMULA else []:
        lengths = [row["num_tokens"] for row in group]
        correct = [int(row["outcome"] == "correct") for row in group]
        by_formula = BY_FORMULA[name](lengths, correct)
        assert [row["reward"] for row in group] == pytest.approx(by_formula, abs=1e-9)
    if name in KILLED:
        killed = tmp_path / "killed"
        assert cli.start(command(name, killed), DIE_AFTER_STEP_2).wait().exit_code == -9
        ended = cli.run([*command(name, killed), "--resume"])
        assert ended.exit_code == 0, ended.stderr
        assert compare_runs(run_dir, killed) == []


def test_every_method_that_samples_is_here() -> None:
    fixed = {"crst", "tokenskip", "step_entropy", "off_policy_sft"}
    assert set(KEYS) == set(METHODS) - fixed
