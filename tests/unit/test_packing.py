"""Packing: nothing lost, nothing twice, within the budget, full, and equally costly for all."""

import hashlib
import math
import random
import time
from collections.abc import Callable, Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opsft.batching.packing import (
    Bin,
    PackingReport,
    describe_plan,
    plan_packing,
    sequence_cost,
)

QUADRATIC_AT = 8192.0
BUDGET = 16_384
LAYOUTS = [(1, 1), (4, 1), (3, 4), (64, 2)]  # data-parallel ranks, multiple of bins
DRAWS: dict[str, Callable[[random.Random], int]] = {
    "lognormal": lambda draw: min(8192, max(20, round(draw.lognormvariate(7.5, 0.6)))),
    "uniform": lambda draw: draw.randint(100, 3600),
    "wide": lambda draw: draw.randint(20, BUDGET),
    "equal": lambda draw: 5000,  # which no exchange can balance
}


def draw_lengths(kind: str, num: int) -> list[int]:
    draw = random.Random(0)
    return [DRAWS[kind](draw) for _ in range(num)]


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> int:
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = next((b for b, free in enumerate(room) if length <= free), None)
        if fits is None:
            room.append(budget - length)
        else:
            room[fits] -= length
    return len(room)


def per_rank(num_bins: int, dp_size: int, multiple: int) -> int:
    return math.ceil(num_bins / (dp_size * multiple)) * multiple


def check_plan(
    plan: list[list[Bin]], lengths: Sequence[int], budget: int, dp_size: int, multiple: int = 1
) -> None:
    assert len(plan) == dp_size
    (num_bins,) = {len(bins) for bins in plan}
    assert num_bins % multiple == 0
    if len(lengths) < 10_000:  # else it takes minutes
        least = per_rank(first_fit_decreasing(lengths, budget), dp_size, multiple)
        assert num_bins in (least, least + multiple)
    packed = sorted(index for bins in plan for indices in bins for index in indices)
    assert packed == list(range(len(lengths)))
    for indices in (indices for bins in plan for indices in bins):
        assert len(indices) <= 1 or sum(lengths[i] for i in indices) <= budget


@settings(deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 8), st.integers(1, 4))
def test_any_lengths_are_packed_once_and_within_the_budget(
    lengths: list[int], dp_size: int, multiple: int
) -> None:
    plan = plan_packing(lengths, budget=256, dp_size=dp_size, multiple=multiple)
    check_plan(plan, lengths, 256, dp_size, multiple)


@pytest.mark.parametrize(
    ("lengths", "budget", "num_bins"),
    [
        ([], 10, 0),
        ([7], 10, 1),
        ([5] * 101, 20, 26),  # all equal
        ([51] * 40, 100, 40),  # all just over half the budget
        ([50] * 40, 100, 20),  # all just half
        ([100_000, *[30] * 50], 100, 18),  # one giant, alone
        ([1] * 17, 1, 17),
        ([3] * 17, 1, 17),  # every sequence longer than the budget
        ([10**i for i in range(6)], 10**5, 2),
        ([0, 0, 5, 5], 5, 2),  # no room is needed for nothing
    ],
)
def test_adversarial_lengths_need_the_least_number_of_bins(
    lengths: list[int], budget: int, num_bins: int
) -> None:
    for dp_size, multiple in LAYOUTS:
        plan = plan_packing(lengths, budget=budget, dp_size=dp_size, multiple=multiple)
        check_plan(plan, lengths, budget, dp_size, multiple)
        assert len(plan[0]) == per_rank(num_bins, dp_size, multiple)


@pytest.mark.parametrize("seed", range(5))
def test_balance_near_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(500, 8000) for _ in range(11)]
    costs = [sequence_cost(length, QUADRATIC_AT) for length in lengths]
    total = sum(costs)
    best = min(
        abs(total - 2 * sum(c for c, one in zip(costs, side, strict=True) if one)) * 2 / total
        for side in product([False, True], repeat=len(lengths))
    )
    plan = plan_packing(lengths, budget=10**6, dp_size=2)
    report = describe_plan(lengths, plan, budget=10**6, quadratic_at=QUADRATIC_AT)
    assert best <= report.imbalance + 1e-9 <= best + 0.03


@pytest.mark.parametrize(
    ("kind", "num", "dp_size"),
    [
        *((kind, num, num // 4) for kind in DRAWS for num in (64, 512)),
        *(("lognormal", 512, dp_size) for dp_size in (1, 8, 32)),
        ("lognormal", 65_536, 512),
    ],
)
def test_bins_are_full_and_ranks_balanced(kind: str, num: int, dp_size: int) -> None:
    """In a time that every rank can spend in every step."""
    lengths = draw_lengths(kind, num)
    begin = time.process_time()
    plan = plan_packing(lengths, budget=BUDGET, dp_size=dp_size)
    assert time.process_time() - begin < 3.0
    check_plan(plan, lengths, BUDGET, dp_size)
    report = describe_plan(lengths, plan, budget=BUDGET, quadratic_at=QUADRATIC_AT)
    if num < 10_000:
        num_bins = per_rank(first_fit_decreasing(lengths, BUDGET), dp_size, 1) * dp_size
        assert report.fill >= min(0.95, sum(lengths) / (num_bins * BUDGET) - 1e-9)
    cost = [sequence_cost(length, QUADRATIC_AT) for length in lengths]
    # More than a rank's share, in one sequence.
    alone = max(0.0, max(cost) * dp_size / sum(cost) - 1)
    assert report.imbalance < (0.1 if num < 8 * dp_size else 0.03) + 1.2 * alone


@pytest.mark.parametrize("dp_size", [2, 8])
def test_micro_batches_of_a_rank_are_equally_costly(dp_size: int) -> None:
    lengths = draw_lengths("lognormal", 512)
    for bins in plan_packing(lengths, budget=BUDGET, dp_size=dp_size):
        costs = [sum(sequence_cost(lengths[i], QUADRATIC_AT) for i in each) for each in bins]
        assert max(costs) <= 1.12 * sum(costs) / len(costs)
        assert costs == sorted(costs, reverse=True)  # like with like on expert-parallel ranks


def test_balance_follows_quadratic_at() -> None:
    lengths = [4000] * 4 + [1000] * 16  # equal tokens, or equal squares: not both
    for quadratic_at in (1e9, 1.0):
        plan = plan_packing(lengths, budget=40_000, dp_size=2, quadratic_at=quadratic_at)
        report = describe_plan(lengths, plan, budget=40_000, quadratic_at=quadratic_at)
        assert report.imbalance <= 0.005
    plan = plan_packing([8000, *[1000] * 8], budget=9_000, dp_size=2, quadratic_at=1e9)
    tokens = [sum(1000 if i else 8000 for indices in bins for i in indices) for bins in plan]
    assert tokens == [8000, 8000]
    plan = plan_packing([4000, *[1000] * 16], budget=16_000, dp_size=2, quadratic_at=1e-3)
    assert plan[[0] in plan[1]] == [[0]]  # 16 short ones cost as much as the long one


def test_describe_plan() -> None:
    plan: list[list[Bin]] = [[[0, 1], []], [[2], [3]]]
    report = describe_plan([100, 100, 100, 250], plan, budget=200, quadratic_at=100.0)
    # Room 3 * 200 + 250; costs 200 + 200 and 200 + 875.
    assert report.fill == pytest.approx(550 / 850)
    assert report.imbalance == pytest.approx(675 / 737.5)
    assert report.num_bins == 4
    empty = describe_plan([], [[[]], [[]]], budget=10, quadratic_at=QUADRATIC_AT)
    assert empty == PackingReport(fill=0.0, imbalance=0.0, num_bins=2)


def test_small_plans_are_the_same_for_ever_so_that_runs_repeat() -> None:
    digest = hashlib.sha256()
    for kind, (dp_size, multiple) in product(DRAWS, LAYOUTS):
        plan = plan_packing(
            draw_lengths(kind, 256), budget=BUDGET, dp_size=dp_size, multiple=multiple
        )
        digest.update(repr(plan).encode())
    assert digest.hexdigest().startswith("8e125289422f3f09")


@pytest.mark.parametrize("multiple", [1, 4])
def test_fewer_sequences_than_ranks_are_one_each(multiple: int) -> None:
    lengths = draw_lengths("lognormal", 512)
    plan = plan_packing(lengths, budget=BUDGET, dp_size=4096, multiple=multiple)
    check_plan(plan, lengths, BUDGET, 4096, multiple)
    assert max(sum(map(len, bins)) for bins in plan) == 1
