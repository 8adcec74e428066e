"""The whole gradient, every parameter under its HF name, against plain Hugging Face autograd; with
a given routing, against one rank's.
"""

from dataclasses import replace
from typing import Any

import pytest
from hf_reference import hf_gradient
from jobs import NUM_ROLLOUTS, Case, gradient
from tiers import for_release
from tiny_models import rounding
from world import World

LAYOUTS = [
    Case(),
    Case(tp=2),
    Case(dp=4),
    Case(pp=2, dp=2, vpp=2),
    Case(tp=2, sequence_parallel=True),
    Case(tp=2, pp=2, vpp=2, sequence_parallel=True),
    Case(cross_entropy="te"),  # on all logits of the response tokens
    Case(cross_entropy="te", model="qwen2_tied", tp=2, sequence_parallel=True),
    Case(cross_entropy="te", model="qwen2_tied", tp=2, pp=2),
]
CONTEXT = [
    Case(cp=4),
    Case(cp=2, tp=2, sequence_parallel=True),
    Case(cp=2, pp=2, vpp=2),
    Case(cp=2, dp=2, all_on_rank=3),
    Case(cp=2, cross_entropy="te"),
    Case(cp=2, model="qwen2_tied", recompute="full"),
    Case(cp=2, model="qwen3_yarn"),
    Case(cp=4, model="qwen3_moe"),
    Case(cp=2, tp=2, model="qwen3_moe", sequence_parallel=True),
]
EXPERTS = [
    replace(case, model="qwen3_moe")
    for case in (
        Case(),
        Case(dp=4, ep=4),
        Case(dp=4, ep=2, all_on_rank=3),
        Case(tp=2, dp=2, ep=4, etp=1, sequence_parallel=True),
        Case(pp=2, vpp=2, dp=2, ep=2),
        Case(cp=2, dp=2, ep=2, overlap=False),
    )
] + [Case(model="qwen3_moe_unnormalized", tp=2, dp=2, sequence_parallel=True)]
MODELS = [
    Case(model="qwen2_tied", pp=2, vpp=2),
    Case(model="qwen2_tied", tp=2, dp=2, sequence_parallel=True),
    Case(model="qwen3", tp=2, pp=2),
    Case(model="qwen3_yarn", tp=2, pp=2),
    Case(model="llama3", tp=2, dp=2, sequence_parallel=True),
    Case(model="llama_mha", tp=4),
    Case(model="mistral", tp=2, pp=2),
]
DELTA_NETS = [
    replace(case, model="qwen3_5")
    for case in (
        Case(),
        Case(tp=2, sequence_parallel=True),
        Case(dp=4, all_on_rank=3),
        Case(pp=2, dp=2, vpp=2),
        Case(tp=2, pp=2, vpp=2, sequence_parallel=True),
        Case(tp=2, sequence_parallel=True, recompute="full"),
        Case(budget=1),
    )
] + [Case(model="qwen3_5_tied", tp=2, pp=2)]
DELTA_NETS += [
    replace(case, model="qwen3_5_moe")
    for case in (
        Case(tp=2, sequence_parallel=True),
        Case(dp=2, all_on_rank=1),
        Case(dp=2, ep=2),
        Case(pp=2, vpp=2, dp=2, ep=2),
        Case(tp=2, dp=2, ep=4, etp=1, sequence_parallel=True),
        Case(pp=2, dp=2, ep=2, recompute="full"),
        Case(cross_entropy="te", dp=2, ep=2),
    )
]
COMBINED = [
    Case(pp=2),
    Case(pp=4),
    Case(cp=2, tp=2),
    Case(cp=2, model="llama3"),
    Case(cp=2, pp=2, model="qwen3_moe"),
    Case(model="qwen2_tied", pp=2, dp=2),
    Case(model="qwen3"),
    Case(model="llama3", pp=2, dp=2),
    Case(model="qwen3_moe", tp=2, pp=2, sequence_parallel=True),
    Case(model="qwen3_moe", tp=2, dp=2, ep=2, sequence_parallel=True),
    Case(
        model="qwen3_moe", tp=2, dp=4, ep=8, etp=1, sequence_parallel=True
    ),  # eight ranks: one expert each
    Case(model="qwen3_5", tp=2),
    Case(model="qwen3_5", pp=4),
    Case(model="qwen3_5", tp=2, pp=2, recompute="selective"),
    Case(model="qwen3_5", cross_entropy="te", tp=2),
    Case(model="qwen3_5", budget=10_000),
    Case(model="qwen3_5_moe"),
    Case(model="qwen3_5_moe", pp=2),
    Case(model="qwen3_5_moe", dp=4, ep=4),
    Case(model="qwen3_5_moe", tp=2, dp=2, ep=2, sequence_parallel=True),
    Case(model="qwen3_5_moe", tp=2, sequence_parallel=True, recompute="selective"),
]
SINGLE_SAMPLE = [
    replace(case, num_samples=1)
    for case in (Case(dp=4), Case(pp=2, vpp=2), Case(tp=2, dp=2), Case(cp=2, dp=2), Case(cp=4))
]
OTHERS = [
    replace(Case(pp=2, dp=2), aggregation="sequence"),
    replace(Case(pp=2, dp=2), aggregation="accepted_tokens"),
    *(Case(pp=2, dp=2, all_on_rank=rank) for rank in (0, 3)),
    *(Case(tp=2, pp=2, recompute=recompute) for recompute in ("selective", "full")),
]


def assert_near(case: Case, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The largest difference of a tensor is small beside the tensor's largest entry."""
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        error = abs(found[name] - want).max() / abs(want).max()
        assert error < rounding(case.model), f"{name}: {error:.2e}"


def check(world: World, case: Case) -> int:
    """Compare loss and gradient with the reference; returns the micro-batches of each rank."""
    loss, num_batches, found = world.run(gradient, case.world_size, case)[0]
    hf_loss, expected = hf_gradient(case.model, case.num_samples, NUM_ROLLOUTS, case.aggregation)
    assert_near(case, found, {name: want.numpy() for name, want in expected.items()})
    assert loss == pytest.approx(hf_loss, rel=1e-5)
    return num_batches


@pytest.mark.parametrize(
    "case",
    [*LAYOUTS, *CONTEXT, *EXPERTS, *DELTA_NETS, *MODELS, *OTHERS, *for_release(COMBINED)],
    ids=str,
)
def test_gradient_matches_hf(world: World, case: Case) -> None:
    check(world, case)


@pytest.mark.quick
@pytest.mark.parametrize("case", SINGLE_SAMPLE, ids=str)
def test_gradient_matches_hf_for_a_single_sample(world: World, case: Case) -> None:
    check(world, case)


@pytest.mark.parametrize(("budget", "expected"), [(1, 7), (50, None), (10_000, 1)])
def test_gradient_matches_hf_for_any_token_budget(
    world: World, budget: int, expected: int | None
) -> None:
    num_batches = check(world, Case(tp=2, dp=2, budget=budget))
    assert expected in (None, num_batches)


FORCED = Case(model="qwen3_moe", replays=True)


@pytest.mark.parametrize(
    "case",
    [
        replace(FORCED, tp=2, pp=2, sequence_parallel=True, recompute="selective"),
        replace(FORCED, pp=2, vpp=2, dp=2, ep=2, recompute="full"),
        replace(FORCED, cp=2, dp=2, ep=2),
        replace(FORCED, dp=4, ep=4, num_samples=3),  # one rank packs only padding
        replace(FORCED, model="qwen3_moe_unnormalized", tp=2, dp=2, sequence_parallel=True),
        replace(FORCED, model="qwen3_5_moe", pp=2, dp=2, ep=2, recompute="selective"),
    ],
    ids=str,
)
def test_the_gradient_of_a_given_routing_is_the_same_in_every_layout(
    world: World, case: Case
) -> None:
    alone = replace(FORCED, model=case.model, num_samples=case.num_samples)
    loss, _, found = world.run(gradient, case.world_size, case)[0]
    expected_loss, _, expected = world.run(gradient, 1, alone)[0]
    own_loss = world.run(gradient, 1, replace(alone, replays=False))[0][0]
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert own_loss != pytest.approx(loss, rel=1e-4)  # the routers would have chosen others
    assert_near(case, found, expected)
