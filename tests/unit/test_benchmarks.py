"""Every benchmark once, as small as it can be: it ends, and its JSON lines have their figures."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_cli import ROOT

pytestmark = pytest.mark.slow

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
}


def lines_of(script: str, *words: str) -> list[dict[str, Any]]:
    """The JSON lines that `benchmarks/script` prints."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), *words]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_against_grpo_prints_each_contender_and_then_the_ratios() -> None:
    sizes = ["--prompts", "1", "--group", "4", "--rows", "2", "--max-tokens", "16"]
    threads = ["--prompt-tokens", "8", "--threads", "1", "--device", "cpu", "--skip-trl"]
    *turns, whole = lines_of("against_grpo.py", "--shape", "tiny", *sizes, *threads)
    assert [turn["contender"] for turn in turns] == ["ours", "grpo_beta0", "grpo_beta"]
    seconds = {turn["contender"]: round(turn["seconds"][0], 4) for turn in turns}
    assert {name: whole[name]["seconds"] for name in seconds} == seconds
    ratio = seconds["ours"] / seconds["grpo_beta"]
    assert whole["ratios"]["grpo_beta"]["seconds"] == pytest.approx(ratio, abs=1e-3)
    assert whole["tokens"]["packed_microbatch"] <= whole["tokens"]["microbatch"] == 36


@pytest.mark.parametrize(
    ("script", "words", "figures"),
    [
        (
            "cross_entropy.py",
            "--tokens 8 --vocab 64 --hidden 16 --repeats 1",
            {"seconds", "seconds_to_eager"},
        ),
        (
            "train_step.py",
            "--layers 1 --hidden 64 --vocab 64 --samples 4 --prompt 2 --response 4 --repeats 1",
            {"seconds", "tokens_per_second", "seconds_to_all_accepted"},
        ),
        ("push.py", "--repeats 1 --bucket-mb 8", {"in_place_to_copy", "stream_to_copy"}),
        ("checkpoint.py", "--repeats 1", {"stall_seconds", "at_once_seconds"}),
    ],
)
def test_a_benchmark_has_its_figures(script: str, words: str, figures: set[str]) -> None:
    lines = lines_of(script, "--device", "cpu", *words.split())
    assert lines
    for line in lines:
        assert all(line[name] > 0 for name in figures), line


def test_convert_has_its_figures(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    (line,) = lines_of("convert.py", "--config", str(config), "--repeats", "1")
    assert line["bytes"] > 0 and line["ratio"] > 0
