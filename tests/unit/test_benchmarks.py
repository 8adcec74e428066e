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

PEERS = "benchmarks/against_peers.py"
PARTS = ["facts of responses", "packing", "tokens to the replica"]
PARTS += ["who holds what", "schedule of a push"]


@pytest.mark.timeout(900)
def test_updates_of_each_kind_of_contender_and_then_the_ratios(cli: ForkedCli) -> None:
    """Two processes for each, which import transformers, Megatron or TRL anew."""
    names = ["ours", "grpo_beta", "trl_beta0"]
    sizes = ["--prompts", "1", "--group", "4", "--rows", "2", "--max-tokens", "16"]
    threads = ["--prompt-tokens", "8", "--threads", "1", "--device", "cpu"]
    words = ["--shape", "tiny", *sizes, *threads, "--contenders", *names]
    ended = cli.run_script(PEERS, "update", *words, wait=800)
    assert ended.exit_code == 0, ended.stderr
    *turns, whole = map(json.loads, ended.stdout.splitlines())
    assert [turn["contender"] for turn in turns] == names
    seconds = {turn["contender"]: round(turn["seconds"][0], 4) for turn in turns}
    assert {name: whole[name]["seconds"] for name in seconds} == seconds
    ratio = seconds["ours"] / seconds["grpo_beta"]
    assert whole["ratios"]["grpo_beta"]["seconds"] == pytest.approx(ratio, abs=1e-3)
    assert whole["ratios"].keys() == {*names} - {"ours"}
    assert whole["tokens"]["packed_microbatch"] <= whole["tokens"]["microbatch"] == 36


def test_whole_steps_of_both_contenders_in_turn(cli: ForkedCli) -> None:
    """On the same prompts, with like lengths and verdicts, though each draws for itself."""
    keys = ["data.prompts_per_step=8", "rollout.group_size=4", "rollout.max_response_tokens=64"]
    words = ["--rounds", "2", "--threads", "1", "--device", "cpu", *keys]
    ended = cli.run_script(PEERS, "step", *words)
    assert ended.exit_code == 0, ended.stderr
    *turns, whole = map(json.loads, ended.stdout.splitlines())
    assert [turn["contender"] for turn in turns] == ["ours", "plain"] * 2
    for turn in turns:
        parts = sum(turn[f"{part}_seconds"] for part in ("rollout", "verify", "train"))
        assert 0 < parts <= turn["seconds"] * 1.01
        assert 32 * 30 < turn["sampled_tokens"] <= 32 * 64
        assert 0 < turn["num_accepted"] < 32
    ratio = whole["ours"]["seconds"] / whole["plain"]["seconds"]
    assert whole["ratios"]["plain"]["seconds"] == pytest.approx(ratio, abs=2e-3)
    assert whole["responses"] == 32


def test_a_contender_that_fails_is_quoted(cli: ForkedCli) -> None:
    ended = cli.run_script(PEERS, "step", "--rounds", "1", "--device", "cpu", "model.path=none")
    assert ended.exit_code != 0 and "model.path=none" in ended.stderr + ended.stdout


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
