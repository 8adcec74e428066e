"""Packing: nothing lost, nothing twice, within the budget, full, and equally costly for all."""

import hashlib
import math
import random
import time
from collections.abc import Callable, Sequence
from itertools import chain, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opsft.trainer.batching.packing import (
    Bin,
    PackingReport,
    describe_plan,
    plan_packing,
    sequence_cost,
    whole_packing,
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
) -> int:
    """The bins of each rank."""
    assert len(plan) == dp_size
    (num_bins,) = {len(bins) for bins in plan}
    assert num_bins % multiple == 0
    if len(lengths) < 10_000:  # else it takes minutes
        least = per_rank(first_fit_decreasing(lengths, budget), dp_size, multiple)
        assert num_bins in (least, least + multiple)
    bins = [*chain.from_iterable(plan)]
    assert sorted(chain.from_iterable(bins)) == list(range(len(lengths)))
    assert all(len(one) <= 1 or sum(lengths[i] for i in one) <= budget for one in bins)
    if len(lengths) <= dp_size and 0 not in lengths:
        assert max(sum(map(len, of_rank)) for of_rank in plan) <= 1
    return num_bins


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
        ([51] * 40, 100, 40),  # all just over half: no two fit
        ([50] * 40, 100, 20),  # all just half
        ([100_000, *[30] * 50], 100, 18),  # one giant, alone
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
        found = check_plan(plan, lengths, budget, dp_size, multiple)
        assert found == per_rank(num_bins, dp_size, multiple)


@pytest.mark.parametrize(
    ("kind", "num", "dp_size"),
    [
        *((kind, num, num // 4) for kind in DRAWS for num in (64, 512)),
        *(("lognormal", 512, dp_size) for dp_size in (1, 2, 8, 32)),
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
    for bins in plan if num >= 64 * dp_size else ():  # the micro-batches of a rank alike, too
        costs = [sum(cost[i] for i in indices) for indices in bins]
        assert max(costs) <= 1.12 * sum(costs) / len(costs)
        assert costs == sorted(costs, reverse=True)  # like with like on expert-parallel ranks


@pytest.mark.parametrize("quadratic_at", [1e9, 1.0])
def test_balance_follows_quadratic_at(quadratic_at: float) -> None:
    """By linear cost the long sequence is worth 8 short ones, by square cost 64."""
    for lengths in ([4000] * 4 + [1000] * 16, [8000] + [1000] * (8 if quadratic_at > 1 else 64)):
        plan = plan_packing(lengths, budget=80_000, dp_size=2, quadratic_at=quadratic_at)
        report = describe_plan(lengths, plan, budget=80_000, quadratic_at=quadratic_at)
        assert report.imbalance <= 0.005


def test_describe_plan() -> None:
    plan: list[list[Bin]] = [[[0, 1], []], [[2], [3]]]
    report = describe_plan([100, 100, 100, 250], plan, budget=200, quadratic_at=100.0)
    # Room 3 * 200 + 250; costs 200 + 200 and 200 + 875.
    assert report.fill == pytest.approx(550 / 850)
    assert report.imbalance == pytest.approx(675 / 737.5)
    empty = describe_plan([], [[[]], [[]]], budget=10, quadratic_at=QUADRATIC_AT)
    assert empty == PackingReport() and empty.fill == empty.imbalance == 0.0
    # Of two updates one after the other: 550 + 60 of 850 + 200; each rank waits in each of them.
    other = describe_plan([60], [[[0]], [[]]], budget=100, quadratic_at=100.0)
    both = whole_packing([report, other])
    assert both.fill == pytest.approx(610 / 1050)
    assert both.imbalance == pytest.approx((675 + 96) / (737.5 + 48))


def test_small_plans_are_the_same_for_ever_so_that_runs_repeat() -> None:
    digest = hashlib.sha256()
    for kind, (dp_size, multiple) in product(DRAWS, LAYOUTS):
        lengths = draw_lengths(kind, 256)
        plan = plan_packing(lengths, budget=BUDGET, dp_size=dp_size, multiple=multiple)
        digest.update(repr(plan).encode())
    assert digest.hexdigest().startswith("8e125289422f3f09")


class CountedLength(int):
    """A length that counts how often it is compared with the room of a bin."""

    num_compared = 0

    def __lt__(self, other: int) -> bool:
        CountedLength.num_compared += 1
        return int(self) < int(other)

    def __gt__(self, other: int) -> bool:
        CountedLength.num_compared += 1
        return int(self) > int(other)

    def __le__(self, other: int) -> bool:
        CountedLength.num_compared += 1
        return int(self) <= int(other)

    def __ge__(self, other: int) -> bool:
        CountedLength.num_compared += 1
        return int(self) >= int(other)


@pytest.mark.parametrize("kind", [*DRAWS])
def test_a_plan_compares_each_length_with_few_bins(kind: str) -> None:
    lengths = [CountedLength(length) for length in draw_lengths(kind, 4000)]
    CountedLength.num_compared = 0
    plan = plan_packing(lengths, budget=BUDGET, dp_size=4)
    assert len(plan[0]) > 100
    assert CountedLength.num_compared < 40 * len(lengths)


def slow_spread(
    lengths: Sequence[int], order: Sequence[int], budget: int, dp_size: int, num_bins: int
) -> list[list[Bin]] | None:
    """The rule itself: of the ranks with room the one of the least cost, there the cheapest bin."""
    plan: list[list[Bin]] = [[[] for _ in range(num_bins)] for _ in range(dp_size)]
    spent = [[0.0] * num_bins for _ in range(dp_size)]
    rank_spent = [0.0] * dp_size

    def fits(rank: int, number: int, length: int) -> bool:
        inside = plan[rank][number]
        return not inside or sum(lengths[i] for i in inside) + length <= budget

    for index in order:
        open_bins = [
            (rank_spent[rank], rank, spent[rank][number], number)
            for rank, number in product(range(dp_size), range(num_bins))
            if fits(rank, number, lengths[index])
        ]
        if not open_bins:
            return None
        _, rank, _, number = min(open_bins)
        cost = sequence_cost(lengths[index], QUADRATIC_AT)
        plan[rank][number].append(index)
        spent[rank][number] += cost
        rank_spent[rank] += cost
    return plan


@pytest.mark.parametrize("seed", range(60))
def test_each_sequence_goes_where_a_look_at_all_bins_sends_it(seed: int) -> None:
    draw = random.Random(seed)
    top = draw.choice([3, 60, 300])
    lengths = [draw.randint(1, top) for _ in range(draw.randint(0, 60))]
    dp_size, multiple, budget = draw.randint(1, 5), draw.randint(1, 3), draw.choice([1, 64, 256])
    plan = plan_packing(lengths, budget=budget, dp_size=dp_size, multiple=multiple)
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    num_bins = per_rank(first_fit_decreasing(lengths, budget), dp_size, multiple)
    slow = None
    while slow is None:
        slow = slow_spread(lengths, order, budget, dp_size, num_bins)
        num_bins += multiple
    for bins in slow:
        bins.sort(key=lambda one: -sum(sequence_cost(lengths[i], QUADRATIC_AT) for i in one))
    assert plan == slow
