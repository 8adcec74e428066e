"""LoRA in every layout: gradients of A and B against Hugging Face with PEFT, and against the chain
rule through merged weights; the merged weights that leave the trainer.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hf_reference import backward
from jobs import (
    NUM_ROLLOUTS,
    OPTIMIZER,
    Case,
    as_arrays,
    build,
    exported,
    gradient,
    merged_export,
    train_steps,
)
from lora_reference import merged_gradient, peft_gradient, peft_model
from tiny_models import SHAPES, merged_weights, rounding, samples
from torch.nn.utils import clip_grad_norm_
from world import World

from megatron_opsft.config import LoraConfig
from megatron_opsft.trainer.model.reference import ReferenceModel

STEPS = 3
LORA = LoraConfig(rank=4, alpha=8.0)
LAYOUTS = [
    replace(case, lora=LORA)
    for case in (
        Case(),
        Case(model="qwen3", tp=2),
        Case(model="llama3", tp=2, dp=2, sequence_parallel=True),
        Case(model="qwen2_tied", tp=2, pp=2, sequence_parallel=True, recompute="full"),
        Case(model="qwen2_tied", pp=2, vpp=2, dp=2, recompute="selective"),
        Case(model="qwen3", cp=2, dp=2, all_on_rank=3),
        Case(model="llama_mha", tp=4),
        Case(model="qwen3_5", tp=2, sequence_parallel=True),
        Case(cp=2, tp=2, cross_entropy="te"),
        Case(dp=4, overlap=False),
    )
]
SOME = LoraConfig(rank=2, alpha=2.0, targets=("q_proj", "v_proj", "up_proj"))
PARTLY = [replace(case, lora=SOME) for case in (Case(model="qwen3"), Case(tp=2, pp=2))]
EXPERTS = [
    replace(case, model="qwen3_moe", lora=LORA)
    for case in (
        Case(),
        Case(tp=2, pp=2, sequence_parallel=True),
        Case(dp=4, ep=4),
        Case(tp=2, dp=2, ep=2, sequence_parallel=True),
        Case(tp=2, dp=2, ep=4, etp=1, sequence_parallel=True),
        Case(pp=2, vpp=2, dp=2, ep=2, recompute="full"),
        Case(cp=2, dp=2, ep=2),
        Case(dp=4, ep=2, etp=2),
    )
] + [
    Case(model="qwen3_5_moe", lora=LORA, tp=2, sequence_parallel=True),
    Case(model="qwen3_5_moe", lora=LORA, pp=2, dp=2, ep=2),
]


def check(world: World, case: Case, reference: Any) -> None:
    loss, _, found = world.run(gradient, case.world_size, case)[0]
    expected_loss, expected = reference(case.model, case.lora, case.num_samples)
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        error = abs(found[name] - want.numpy()).max() / abs(want).max()
        assert error < rounding(case.model), f"{name}: {error:.2e}"
    assert loss == pytest.approx(expected_loss, rel=1e-5)


@pytest.mark.parametrize("case", LAYOUTS + PARTLY, ids=str)
def test_gradient_of_adapters_matches_peft(world: World, case: Case) -> None:
    check(world, case, peft_gradient)


@pytest.mark.parametrize("case", EXPERTS, ids=str)
def test_gradient_of_experts_adapters_matches_that_of_merged_weights(
    world: World, case: Case
) -> None:
    check(world, case, merged_gradient)


@pytest.mark.parametrize("case", [LAYOUTS[3], PARTLY[1], EXPERTS[3], EXPERTS[4]], ids=str)
def test_what_leaves_the_trainer_is_merged(world: World, case: Case) -> None:
    found = world.run(merged_export, case.world_size, case)[0]
    expected = merged_weights(case.model, case.lora)
    if SHAPES[case.model].tied_embeddings:
        expected.pop("lm_head.weight", None)
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        torch.testing.assert_close(torch.from_numpy(found[name]), want, rtol=1e-6, atol=1e-7)


@cache
def peft_training(name: str, lora: LoraConfig, num_samples: int) -> tuple[list[float], list[float]]:
    """Losses, and gradient norms before clipping, of PEFT's model with torch's own AdamW."""
    model, trained = peft_model(name, lora)
    adamw = torch.optim.AdamW(
        trained.values(),
        lr=OPTIMIZER.lr,
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
        eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
    )
    losses, norms = [], []
    for step in range(STEPS):
        adamw.zero_grad()
        losses.append(
            backward(model, samples(num_samples, seed=step), NUM_ROLLOUTS, "max_accepted")
        )
        norms.append(float(clip_grad_norm_(trained.values(), OPTIMIZER.clip_grad)))
        adamw.step()
    return losses, norms


def train(case: Case) -> list[tuple[float, float]]:
    built = build(case)
    return [(r.loss, r.grad_norm) for r in train_steps(built, case, range(STEPS))]


@pytest.mark.parametrize("case", [LAYOUTS[0], LAYOUTS[2], LAYOUTS[3], LAYOUTS[6]], ids=str)
def test_steps_match_peft_with_torch_adamw(world: World, case: Case) -> None:
    found = world.run(train, case.world_size, case)[0]
    losses, norms = peft_training(case.model, case.lora, case.num_samples)
    assert [loss for loss, _ in found] == pytest.approx(losses, rel=1e-5)
    assert [norm for _, norm in found] == pytest.approx(norms, rel=1e-5)
    assert min(norms) > 2 * OPTIMIZER.clip_grad


@pytest.mark.parametrize("case", [EXPERTS[3], EXPERTS[4], EXPERTS[6], EXPERTS[7]], ids=str)
def test_steps_of_experts_adapters_are_one_ranks(world: World, case: Case) -> None:
    """Norms too: they count each parameter once, whatever ranks hold it."""
    found = world.run(train, case.world_size, case)[0]
    alone = Case(model=case.model, lora=case.lora)
    expected = world.run(train, 1, alone)[0]
    assert [loss for loss, _ in found] == pytest.approx([x for x, _ in expected], rel=1e-5)
    assert [norm for _, norm in found] == pytest.approx([x for _, x in expected], rel=1e-5)


def reference_and_policy(case: Case) -> tuple[int, int]:
    """Check the reference's weights, first those of the start, then of one step later; return the
    elements that the reference holds, and those that are trained.
    """
    built = build(case)
    first = as_arrays(exported(built))
    reference = ReferenceModel(built.trainer, case.device)
    train_steps(built, case, range(1))
    policy = as_arrays(exported(built))
    assert any((policy[name] != first[name]).any() for name in first)
    with reference.in_place():
        frozen = as_arrays(exported(built))
    assert all((frozen[name] == first[name]).all() for name in first)
    reference.replace()
    with reference.in_place():
        replaced = as_arrays(exported(built))
    assert all((replaced[name] == policy[name]).all() for name in policy)
    parameters = [p for model in built.trainer.models for p in model.parameters()]
    held = sum(tensor.numel() for tensor in reference._frozen_of.values())
    return held, sum(p.numel() for p in parameters if p.requires_grad)


@pytest.mark.parametrize("case", [LAYOUTS[2], EXPERTS[3]], ids=str)
def test_the_reference_is_other_adapters_on_the_same_weights(world: World, case: Case) -> None:
    for held, trained in world.run(reference_and_policy, case.world_size, case):
        assert held == trained
