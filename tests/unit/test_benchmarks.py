"""Scripts that print JSON lines, each once and small; those of the proof's stages:
tests/gloo/test_gpu_proof.py.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from forked_cli import ROOT, ForkedCli

pytestmark = pytest.mark.slow

PARTS = ["facts of responses", "packing", "tokens to the replica"]
PARTS += ["who holds what", "schedule of a push"]


def test_against_grpo_prints_each_contender_and_then_the_ratios(cli: ForkedCli) -> None:
    sizes = ["--prompts", "1", "--group", "4", "--rows", "2", "--max-tokens", "16"]
    threads = ["--prompt-tokens", "8", "--threads", "1", "--device", "cpu"]
    ended = cli.run_script("benchmarks/against_grpo.py", "--shape", "tiny", *sizes, *threads)
    assert ended.exit_code == 0, ended.stderr
    *turns, whole = map(json.loads, ended.stdout.splitlines())
    assert [turn["contender"] for turn in turns] == ["ours", "grpo_beta0", "grpo_beta"]
    seconds = {turn["contender"]: round(turn["seconds"][0], 4) for turn in turns}
    assert {name: whole[name]["seconds"] for name in seconds} == seconds
    ratio = seconds["ours"] / seconds["grpo_beta"]
    assert whole["ratios"]["grpo_beta"]["seconds"] == pytest.approx(ratio, abs=1e-3)
    assert whole["tokens"]["packed_microbatch"] <= whole["tokens"]["microbatch"] == 36


def test_every_part_is_rehearsed(tmp_path: Path) -> None:
    """Of a small mixture on 4 and on 8 ranks, four of which share its experts. Nothing that is
    imported warns.
    """
    large = ROOT / "megatron_opsft/assets/model_configs/Qwen/Qwen3-30B-A3B/config.json"
    small = {"num_hidden_layers": 2, "num_experts": 8, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(json.loads(large.read_text()) | small))
    words = ["examples/configs/quickstart.yaml", f"model.path={tmp_path}", "rollout.engine=vllm"]
    words += ["parallel.tp=2", "parallel.sequence_parallel=true", "parallel.ep=4"]
    words += ["parallel.etp=1", "--ranks", "4", "8", "--json"]
    command = [sys.executable, "tools/rehearse.py", *words]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0 and not ended.stderr, ended.stderr
    rows = [json.loads(line) for line in ended.stdout.splitlines()]
    found = [(row["ranks"], row["part"]) for row in rows]
    assert found == [(ranks, part) for ranks in (4, 8) for part in PARTS]
    assert all(row["seconds"] >= 0 and row["bytes"] > 0 for row in rows)
