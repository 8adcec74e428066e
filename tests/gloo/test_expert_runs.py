"""Whole runs of a small mixture of experts: the same numbers wherever its experts are."""

import shutil
from pathlib import Path

import pytest
import torch
from forked_cli import ROOT
from jobs import run_training
from run_differences import read_lines
from small_run import QUICKSTART, SMALL_RUN
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM
from world import World

REASONER = ROOT / "megatron_opsft/assets/tiny_reasoner"
RUN = [
    *SMALL_RUN,
    "run.steps=2",
    "rollout.max_response_tokens=24",
    "verify.judge=coin_judge:half_of_them",
    "optimizer.lr=1e-3",
]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, the shipped tokenizer."""
    directory = tmp_path_factory.mktemp("mixture")
    vocab_size = len(AutoTokenizer.from_pretrained(REASONER))
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=vocab_size,
            hidden_size=32,
            intermediate_size=64,
            moe_intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            max_position_embeddings=512,
            tie_word_embeddings=False,
        )
    ).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (REASONER / name).exists():
            shutil.copy(REASONER / name, directory)
    return directory


def train(world: World, model: Path, run_dir: Path, ranks: int, *more: str) -> None:
    words = [*RUN, f"model.path={model}", f"run.dir={run_dir}", *more]
    assert world.run(run_training, ranks, QUICKSTART, words) == [0] * ranks


@pytest.fixture(scope="module")
def on_one_rank(world: World, mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("run") / "one"
    train(world, mixture, run_dir, 1)
    return run_dir


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, ["parallel.ep=2"]),
        (4, ["parallel.ep=2", "parallel.tp=2", "parallel.sequence_parallel=true"]),
        (4, ["parallel.ep=4", "rollout.tp=1"]),
    ],
)
def test_rollouts_losses_and_norms_do_not_depend_on_where_experts_are(
    world: World, mixture: Path, on_one_rank: Path, tmp_path: Path, ranks: int, layout: list[str]
) -> None:
    run_dir = tmp_path / "run"
    train(world, mixture, run_dir, ranks, *layout)
    assert_same_responses(on_one_rank / "rollouts", run_dir / "rollouts")
    expected, found = (read_lines(d / "metrics.jsonl") for d in (on_one_rank, run_dir))
    for one, other in zip(expected, found, strict=True):
        assert 0 < one["num_accepted"] == other["num_accepted"] < 24
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)


def assert_same_responses(one: Path, other: Path) -> None:
    assert {p.name: p.read_bytes() for p in one.iterdir()} == {
        p.name: p.read_bytes() for p in other.iterdir()
    }
