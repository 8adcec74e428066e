"""The benchmark against GRPO, as small as it can be; the others: tests/gloo/test_gpu_proof.py."""

import json
import subprocess
import sys
from typing import Any

import pytest
from forked_cli import ROOT

pytestmark = pytest.mark.slow


def lines_of(script: str, *words: str) -> list[dict[str, Any]]:
    """The JSON lines that `benchmarks/script` prints."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), *words]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_against_grpo_prints_each_contender_and_then_the_ratios() -> None:
    sizes = ["--prompts", "1", "--group", "4", "--rows", "2", "--max-tokens", "16"]
    threads = ["--prompt-tokens", "8", "--threads", "1", "--device", "cpu"]
    *turns, whole = lines_of("against_grpo.py", "--shape", "tiny", *sizes, *threads)
    assert [turn["contender"] for turn in turns] == ["ours", "grpo_beta0", "grpo_beta"]
    seconds = {turn["contender"]: round(turn["seconds"][0], 4) for turn in turns}
    assert {name: whole[name]["seconds"] for name in seconds} == seconds
    ratio = seconds["ours"] / seconds["grpo_beta"]
    assert whole["ratios"]["grpo_beta"]["seconds"] == pytest.approx(ratio, abs=1e-3)
    assert whole["tokens"]["packed_microbatch"] <= whole["tokens"]["microbatch"] == 36
