"""Whole runs of a small mixture of experts: the same numbers wherever its experts are."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_cli import ROOT, ForkedCli
from hf_configs import hf_config
from jobs import run_training
from run_differences import compare_runs, read_lines
from safetensors.torch import load_file, save_file
from small_run import QUICKSTART, SMALL_RUN
from tiny_models import SHAPES
from transformers import (
    AutoTokenizer,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from world import World

REASONER = ROOT / "megatron_opsft/assets/tiny_reasoner"
RUN = [
    *SMALL_RUN,
    "run.steps=2",
    "rollout.max_response_tokens=24",
    "verify.judge=own_judges:half_of_them",
    "optimizer.lr=1e-3",
]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixture(tmp_path_factory.mktemp("mixture"), num_experts=4, num_experts_per_tok=2)


@pytest.fixture(scope="module")
def undecided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of many experts that say different things and are often nearly tied."""
    many = {"num_experts": 32, "num_experts_per_tok": 4, "initializer_range": 0.2}
    return make_mixture(tmp_path_factory.mktemp("undecided"), **many)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of Qwen3.5's family as they are published: a model that sees, experts in stacks."""
    directory = tmp_path_factory.mktemp("shared")
    shape = replace(
        SHAPES["qwen3_5_moe"],
        architecture="Qwen3_5MoeForConditionalGeneration",
        vocab_size=len(AutoTokenizer.from_pretrained(REASONER)),
        max_position_embeddings=512,
    )
    config = hf_config(shape)
    config.vision_config.out_hidden_size = shape.hidden_size
    config.architectures = [shape.architecture]
    config.save_pretrained(directory)
    torch.manual_seed(0)
    model = Qwen3_5MoeForConditionalGeneration(config)
    state = {name: parameter.data for name, parameter in model.named_parameters()}
    save_file(state, directory / "model.safetensors", {"format": "pt"})
    return with_tokenizer(directory)


def make_mixture(directory: Path, **more: Any) -> Path:
    """Random weights, the shipped tokenizer."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 24, "head_dim": 8}
    config = Qwen3MoeConfig(
        **sizes,
        vocab_size=len(AutoTokenizer.from_pretrained(REASONER)),
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        norm_topk_prob=True,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        **more,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return with_tokenizer(directory)


def with_tokenizer(directory: Path) -> Path:
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
    one_rank, several = (
        {path.name: path.read_bytes() for path in (d / "rollouts").iterdir()}
        for d in (on_one_rank, run_dir)
    )
    assert one_rank == several
    expected, found = (read_lines(d / "metrics.jsonl") for d in (on_one_rank, run_dir))
    for one, other in zip(expected, found, strict=True):
        assert 0 < one["num_accepted"] == other["num_accepted"] < 24
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_trains_on_the_experts_that_its_engine_chose(
    world: World, undecided: Path, tmp_path: Path, dtype: str
) -> None:
    """In float32 they are the trainer's own; in bfloat16 replaying them brings the two closer: on
    the responses of the first step, which both runs sample alike. Later their weights differ.
    """
    lines = {}
    for replays in (False, True):
        words = ["parallel.ep=2", f"model.dtype={dtype}", f"train.routing_replay={replays}"]
        words.append("rollout.max_response_tokens=64")
        train(world, undecided, tmp_path / str(replays), 2, *words)
        lines[replays] = read_lines(tmp_path / str(replays) / "metrics.jsonl")
    if dtype == "bfloat16":
        without, replayed = lines[False][0], lines[True][0]
        for key in ("num_accepted", "mean_response_tokens"):
            assert without[key] == replayed[key] > 0
        assert replayed["logprob_diff_mean"] < without["logprob_diff_mean"]
        assert replayed["logprob_diff_max"] < without["logprob_diff_max"] / 2
        return
    assert any(row["num_accepted"] for row in lines[True])
    for without, replayed in zip(lines[False], lines[True], strict=True):
        for key in ("loss", "grad_norm", "logprob_diff_mean"):
            assert replayed[key] == pytest.approx(without[key], rel=1e-5, abs=1e-6)


def test_a_killed_run_that_replays_resumes_to_the_last_bit(
    cli: ForkedCli, undecided: Path, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    words = ["train", QUICKSTART, *RUN, f"model.path={undecided}", "model.dtype=bfloat16"]
    words += ["train.routing_replay=true", "checkpoint.every=1"]
    assert cli.run([*words, f"run.dir={whole}"]).exit_code == 0
    shutil.copytree(whole, killed)
    for name in ("hf", "checkpoints/step_000002"):
        shutil.rmtree(killed / name)
    (killed / "summary.json").unlink()
    resumed = cli.run([*words, f"run.dir={killed}", "--resume"])
    assert resumed.exit_code == 0, resumed.stderr
    assert "1 of 2 steps are done" in resumed.stdout
    assert compare_runs(whole, killed) == []


def test_a_run_of_a_mixture_with_a_shared_expert(
    world: World, shared: Path, tmp_path: Path
) -> None:
    """The engine's routing is the trainer's. The trained model stacks its experts, and sees as
    before.
    """
    lines = {}
    for ranks, layout in ((1, []), (2, ["parallel.ep=2"]), (2, ["parallel.pp=2"])):
        run_dir = tmp_path / f"{ranks}{layout}"
        words = [*layout, "train.routing_replay=true", "rollout.max_response_tokens=96"]
        train(world, shared, run_dir, ranks, *words)
        lines[str(layout)] = read_lines(run_dir / "metrics.jsonl")
        trained = load_file(run_dir / "hf/model.safetensors")
        before = load_file(shared / "model.safetensors")
        assert {k: v.shape for k, v in trained.items()} == {k: v.shape for k, v in before.items()}
        name = "model.language_model.layers.1.mlp.experts.gate_up_proj"
        assert not torch.equal(trained[name], before[name])
        seeing = [name for name in trained if name.startswith("model.visual.")]
        assert seeing and all(torch.equal(trained[name], before[name]) for name in seeing)
    one_rank, *others = lines.values()
    for other in others:
        for one, found in zip(one_rank, other, strict=True):
            assert 0 < one["num_accepted"] == found["num_accepted"] < 24
            assert one["logprob_diff_max"] < 1e-3
            for key in ("loss", "grad_norm"):
                assert found[key] == pytest.approx(one[key], rel=1e-3)
