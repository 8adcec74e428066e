"""The whole gradient, every parameter under its HF name, against plain Hugging Face autograd."""

from dataclasses import replace

import pytest
import torch
from hf_reference import hf_gradient
from jobs import NUM_ROLLOUTS, Case, gradient
from tiny_models import samples
from world import World

from megatron_opsft.methods.aggregation import Aggregation

LIMIT = 1e-5  # largest difference of a tensor / largest entry of that tensor, float32

LAYOUTS = [
    Case(tp=tp, pp=pp, dp=dp)
    for tp, pp, dp in (
        (1, 1, 1),
        (2, 1, 1),
        (1, 2, 1),
        (1, 1, 2),
        (2, 2, 1),
        (2, 1, 2),
        (1, 2, 2),
        (1, 1, 4),
    )
]
SPECIAL = [
    Case(pp=2, vpp=2),
    Case(pp=2, dp=2, vpp=2),
    Case(tp=2, sequence_parallel=True),
    Case(tp=2, pp=2, sequence_parallel=True),
    Case(tp=2, pp=2, vpp=2, sequence_parallel=True),
]
CONTEXT = [
    Case(cp=2),
    Case(cp=4),
    Case(cp=2, tp=2),
    Case(cp=2, tp=2, sequence_parallel=True),
    Case(cp=2, pp=2),
    Case(cp=2, pp=2, vpp=2),
    Case(cp=2, dp=2),
    Case(cp=2, cross_entropy="te"),
    Case(cp=2, model="qwen2_tied", recompute="full"),
    Case(cp=2, model="llama3"),
    Case(cp=2, model="qwen3_moe"),
    Case(cp=4, model="qwen3_moe"),
    Case(cp=2, pp=2, model="qwen3_moe"),
    Case(cp=2, tp=2, model="qwen3_moe", sequence_parallel=True),
]
EXPERTS = [
    replace(case, model="qwen3_moe")
    for case in (
        Case(dp=2, ep=2),
        Case(dp=4, ep=4),
        Case(dp=4, ep=2),
        Case(tp=2, dp=2, ep=2, sequence_parallel=True),
        Case(tp=2, ep=2, etp=1, sequence_parallel=True),
        Case(tp=2, dp=2, ep=4, etp=1, sequence_parallel=True),
        Case(pp=2, dp=2, ep=2),
        Case(pp=2, vpp=2, dp=2, ep=2),
        Case(cp=2, ep=2),
        Case(cp=2, dp=2, ep=2, overlap=False),
        Case(dp=4, ep=2, all_on_rank=3),
    )
]
MODELS = [
    Case(model=model, tp=tp, pp=pp, dp=dp, sequence_parallel=sp)
    for model in ("qwen2_tied", "qwen3", "llama3")
    for tp, pp, dp, sp in ((1, 1, 1, False), (2, 1, 2, True), (2, 2, 1, False), (1, 2, 2, False))
] + [Case(model="llama_mha", tp=4), Case(model="qwen2_tied", pp=2, vpp=2)]
MODELS += [
    Case(model="mistral"),
    Case(model="mistral", tp=2, pp=2),
    Case(model="qwen3_moe"),
    Case(model="qwen3_moe", pp=2),
    Case(model="qwen3_moe", dp=2),
    Case(model="qwen3_moe", tp=2, sequence_parallel=True),
    Case(model="qwen3_moe", tp=2, pp=2, sequence_parallel=True),
    Case(model="qwen3_moe_unnormalized", tp=2, dp=2, sequence_parallel=True),
]


def check(world: World, case: Case) -> int:
    """Compare loss and gradient with the reference; returns the micro-batches of each rank."""
    loss, num_batches, found = world.run(gradient, case.world_size, case)[0]
    hf_loss, expected = hf_gradient(case.model, case.num_samples, NUM_ROLLOUTS, case.aggregation)
    assert found.keys() == expected.keys()
    errors = {
        name: float((torch.from_numpy(found[name]) - want).abs().max() / want.abs().max())
        for name, want in expected.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] < LIMIT, f"{worst}: {errors[worst]:.2e}"
    assert loss == pytest.approx(hf_loss, rel=1e-5)
    return num_batches


# The cross-entropy on all logits of the response tokens.
UNFUSED = [
    Case(cross_entropy="te", model=model, tp=tp, pp=pp, sequence_parallel=sp)
    for model, tp, pp, sp in (
        ("qwen2", 1, 1, False),
        ("qwen2_tied", 2, 1, True),
        ("qwen2_tied", 2, 2, False),
    )
]


@pytest.mark.parametrize("case", LAYOUTS + SPECIAL + UNFUSED, ids=str)
def test_gradient_matches_hf_in_layout(world: World, case: Case) -> None:
    check(world, case)


@pytest.mark.parametrize("case", CONTEXT, ids=str)
def test_gradient_matches_hf_with_context_parallelism(world: World, case: Case) -> None:
    lengths = [len(s.prompt_ids) + len(s.response_ids) for s in samples(case.num_samples)]
    assert min(lengths) < 2 * 4 and any(length % 8 for length in lengths)  # padding at work
    check(world, case)


@pytest.mark.parametrize("case", EXPERTS, ids=str)
def test_gradient_matches_hf_with_expert_parallelism(world: World, case: Case) -> None:
    check(world, case)


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_gradient_matches_hf_for_model(world: World, case: Case) -> None:
    check(world, case)


@pytest.mark.parametrize("budget", [1, 50, 120, 10_000])
def test_gradient_matches_hf_for_any_token_budget(world: World, budget: int) -> None:
    num_batches = check(world, Case(tp=2, dp=2, budget=budget))
    assert num_batches == {1: 7, 10_000: 1}.get(budget, num_batches)


@pytest.mark.parametrize("aggregation", ["sequence", "accepted_tokens"])
def test_gradient_matches_hf_for_aggregation(world: World, aggregation: Aggregation) -> None:
    check(world, replace(Case(pp=2, dp=2), aggregation=aggregation))


@pytest.mark.parametrize("rank", [0, 3])
def test_gradient_matches_hf_when_one_rank_accepted_everything(world: World, rank: int) -> None:
    check(world, Case(pp=2, dp=2, all_on_rank=rank))


def test_gradient_matches_hf_when_one_rank_of_a_context_parallel_group_accepted_everything(
    world: World,
) -> None:
    check(world, Case(cp=2, dp=2, all_on_rank=3))


@pytest.mark.quick
@pytest.mark.parametrize(
    "case", [Case(dp=4), Case(pp=2, vpp=2), Case(tp=2, dp=2), Case(cp=2, dp=2), Case(cp=4)], ids=str
)
def test_gradient_matches_hf_for_a_single_sample(world: World, case: Case) -> None:
    check(world, replace(case, num_samples=1))


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_gradient_matches_hf_with_recomputation(world: World, recompute: str) -> None:
    check(world, Case(tp=2, pp=2, recompute=recompute))
