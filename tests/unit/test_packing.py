"""Packing: nothing lost, nothing twice, within the budget, equally many micro-batches for all."""

import random

import pytest

from megatron_opsft.objective.packing import pack_bins, plan_packing, sequence_cost


def draw_lengths(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randint(1, 300) for _ in range(draw.randint(1, 60))]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("dp_size", "multiple"), [(1, 1), (2, 1), (3, 4), (8, 2)])
def test_every_sequence_is_packed_once_and_within_the_budget(
    seed: int, dp_size: int, multiple: int
) -> None:
    lengths, budget = draw_lengths(seed), 256
    plan = plan_packing(lengths, budget=budget, dp_size=dp_size, multiple=multiple)
    assert len(plan) == dp_size
    (num_bins,) = {len(bins) for bins in plan}
    assert num_bins % multiple == 0
    packed = sorted(index for bins in plan for indices in bins for index in indices)
    assert packed == list(range(len(lengths)))
    for bins in plan:
        for indices in bins:
            assert len(indices) == 1 or sum(lengths[i] for i in indices) <= budget


@pytest.mark.parametrize("seed", range(20))
def test_no_more_microbatches_than_needed(seed: int) -> None:
    lengths, budget = draw_lengths(seed), 300
    lower_bound = -(-sum(lengths) // budget)
    num_bins = len(pack_bins(lengths, budget))
    assert num_bins <= 11 / 9 * lower_bound + 1  # first-fit-decreasing's guarantee, and more
    for dp_size in (1, 2, 4):
        per_rank = len(plan_packing(lengths, budget=budget, dp_size=dp_size)[0])
        assert per_rank == -(-num_bins // dp_size)


def test_ranks_are_balanced() -> None:
    draw = random.Random(1)
    lengths = [int(min(3500, draw.lognormvariate(6.5, 0.6))) for _ in range(400)]
    plan = plan_packing(lengths, budget=16384, dp_size=8)
    costs = [sum(sequence_cost(lengths[i]) for b in bins for i in b) for bins in plan]
    assert max(costs) / (sum(costs) / len(costs)) < 1.05


def test_longer_sequence_than_the_budget_is_alone() -> None:
    plan = plan_packing([500, 10, 10], budget=100, dp_size=1)
    assert sorted(sorted(indices) for indices in plan[0]) == [[0], [1, 2]]
