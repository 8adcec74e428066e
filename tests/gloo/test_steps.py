"""`Trainer.step` over several updates, against Hugging Face with torch's AdamW, in every layout."""

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_reference import hf_training
from jobs import (
    NUM_ROLLOUTS,
    OPTIMIZER,
    Built,
    Case,
    as_arrays,
    batches_of,
    build,
    exported,
    gather_from_all,
    train_steps,
)
from safetensors.torch import load_file, save_file
from tiers import for_release
from tiny_models import rounding
from world import World

import megatron_opsft
from megatron_opsft.config import Config
from megatron_opsft.errors import NonFiniteError
from megatron_opsft.models.architectures.config_from_hf import read_model_shape
from megatron_opsft.records import StepResult
from megatron_opsft.runtime.distributed import start_distributed
from megatron_opsft.trainer.model.load import build_trainer
from megatron_opsft.trainer.model.transformer_config import DTYPES

STEPS = 3
TINY_REASONER = Path(megatron_opsft.__file__).parent / "assets/tiny_reasoner"
LAYOUTS = [
    Case(),
    Case(tp=2, dp=2),
    Case(dp=4, overlap=False),
    Case(pp=2, dp=2, vpp=2),
    Case(tp=2, pp=2, vpp=2, sequence_parallel=True),
    Case(model="qwen2_tied", pp=2, dp=2),
    Case(model="qwen3_5", tp=2, dp=2),
    Case(model="qwen3_5_moe", tp=2, dp=2, ep=2, sequence_parallel=True),
    Case(model="qwen3_moe", dp=4, ep=2),
    Case(model="qwen3_moe", tp=2, ep=2, etp=1, sequence_parallel=True),
]
COMBINED = [
    Case(tp=2, pp=2),
    Case(pp=2, dp=2),
    Case(pp=4),
    Case(dp=4),
    Case(model="qwen3", tp=2, dp=2, sequence_parallel=True),
    Case(model="llama3", tp=2, pp=2),
    Case(model="qwen3_5", tp=2, pp=2, sequence_parallel=True),
    Case(model="qwen3_moe", tp=2, dp=2, ep=2, sequence_parallel=True),
]


Trained = tuple[list[StepResult], dict[str, Any]]


def train(case: Case) -> Trained:
    built = build(case)
    results = train_steps(built, case, range(STEPS))
    return results, as_arrays(exported(built))


@pytest.fixture(scope="module")
def trained(world: World) -> Callable[[Case], Trained]:
    """`train` of rank 0, once for each case."""
    return cache(lambda case: world.run(train, case.world_size, case)[0])


def worst_difference(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(
        float((torch.from_numpy(found[name]) - want).abs().max()) for name, want in expected.items()
    )


@pytest.mark.parametrize("case", [*LAYOUTS, *for_release(COMBINED)], ids=str)
def test_losses_norms_and_weights_match_hf_with_torch_adamw(
    trained: Callable[[Case], Trained], case: Case
) -> None:
    results, found = trained(case)
    losses, norms, expected = hf_training(
        case.model, case.num_samples, NUM_ROLLOUTS, OPTIMIZER, STEPS
    )
    assert min(norms) > 2 * OPTIMIZER.clip_grad
    assert [r.loss for r in results] == pytest.approx(losses, rel=1e-5)
    assert [r.grad_norm for r in results] == pytest.approx(norms, rel=rounding(case.model))
    # An entry moves by up to the learning rate in each of the steps.
    assert worst_difference(found, expected) < 0.02 * OPTIMIZER.lr
    assert all(r.applied and r.lr == OPTIMIZER.lr for r in results)


@pytest.mark.parametrize("case", [Case(tp=2, pp=2), Case(dp=4)], ids=str)
def test_bfloat16_is_close_to_float32(world: World, case: Case) -> None:
    results, _ = world.run(train, case.world_size, replace(case, dtype="bfloat16"))[0]
    losses, norms, _ = hf_training(case.model, case.num_samples, NUM_ROLLOUTS, OPTIMIZER, STEPS)
    assert [r.loss for r in results] == pytest.approx(losses, rel=0.01)
    assert [r.grad_norm for r in results] == pytest.approx(norms, rel=0.03)


def loaded(dtype: str, directory: Path) -> tuple[bool, bool]:
    """Of a model stored in one dtype and trained in another: whether each parameter is the stored
    value in the other dtype, and whether the main weights are the parameters.
    """
    sections = {"model": {"path": str(directory), "dtype": dtype}, "data": {"train": "none.jsonl"}}
    case = Case(dtype=dtype)
    layout = start_distributed(case.device, case.parallel)
    config = Config.model_validate(sections)
    shape = read_model_shape(directory)
    parts = build_trainer(config, shape, directory, case.device, layout)
    parts.fill_from_disk()
    kept = {n: t.to(DTYPES[dtype]) for n, t in load_file(directory / "model.safetensors").items()}
    found = exported(Built(trainer=parts.trainer, shards=parts.shards, layout=layout))
    (part,) = parts.trainer.optimizer.chained_optimizers
    main = torch.cat([p.detach().flatten().float() for p in part.get_parameters()])
    own = torch.cat([p.detach().flatten().float() for _, p in parts.shards.parameters])
    equal = all(torch.equal(found[name], kept[name]) for name in kept)
    return equal, torch.equal(main.sort().values, own.sort().values)


@pytest.mark.parametrize(
    ("stored", "dtype"), [("float32", "bfloat16"), ("bfloat16", "float32")], ids=str
)
def test_weights_of_another_dtype_are_converted(
    world: World, stored: str, dtype: str, tmp_path: Path
) -> None:
    shutil.copy(TINY_REASONER / "config.json", tmp_path)
    values = load_file(TINY_REASONER / "model.safetensors")
    save_file({n: t.to(DTYPES[stored]) for n, t in values.items()}, tmp_path / "model.safetensors")
    assert world.run(loaded, 1, dtype, tmp_path) == [(True, True)]


def skip_between_updates(case: Case) -> tuple[StepResult, bool, list[StepResult]]:
    """An update, a step with nothing accepted, another update."""
    built = build(case)
    first = train_steps(built, case, range(1))
    before = exported(built)
    batches, factor = batches_of(replace(case, num_samples=0), built.layout)
    skipped = built.trainer.step(batches, factor, lr=OPTIMIZER.lr)
    assert set(gather_from_all([skipped])) == {skipped}
    after = exported(built)
    unchanged = all(torch.equal(before[name], after[name]) for name in before)
    return skipped, unchanged, first + train_steps(built, case, range(1, 2))


@pytest.mark.parametrize("case", [Case(tp=2, pp=2), Case(dp=4)], ids=str)
def test_nothing_accepted_changes_nothing_on_any_rank(
    world: World, trained: Callable[[Case], Trained], case: Case
) -> None:
    skipped, unchanged, updates = world.run(skip_between_updates, case.world_size, case)[0]
    assert not skipped.applied and skipped.trained_tokens == 0
    assert unchanged
    undisturbed, _ = trained(case)
    assert updates == undisturbed[:2]


def spoil(case: Case, what: str) -> tuple[str, bool]:
    """A step that is not finite because of one rank: message, and whether the weights stayed."""
    built = build(case)
    train_steps(built, case, range(1))
    last = built.layout.rank == dist.get_world_size() - 1
    parameter = built.trainer.models[-1].decoder.layers[0].mlp.linear_fc2.weight
    if last and what == "weight":
        parameter.data[0, 0] = math.inf
    if last and what == "gradient":
        parameter.register_hook(lambda gradient: gradient * math.nan)
    before = exported(built)
    batches, factor = batches_of(case, built.layout, seed=1)
    try:
        built.trainer.step(batches, factor, lr=OPTIMIZER.lr)
    except NonFiniteError as error:
        after = exported(built)
        return str(error), all(torch.equal(before[name], after[name]) for name in before)
    raise AssertionError("the step was applied")


@pytest.mark.parametrize(
    ("case", "what"),
    [(Case(), "weight"), (Case(tp=2, pp=2), "gradient"), (Case(dp=4), "weight")],
    ids=str,
)
def test_a_step_that_is_not_finite_on_one_rank_is_applied_on_none(
    world: World, case: Case, what: str
) -> None:
    for message, unchanged in world.run(spoil, case.world_size, case, what):
        assert "the step was not applied" in message
        assert unchanged
