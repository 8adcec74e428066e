"""Costs of passes and what drafts have saved, of made machines that take exactly so long."""

import random

import pytest

from megatron_opsft.rollout.pass_costs import PassCosts, PassShape
from megatron_opsft.rollout.saved_seconds import BatchSeconds


def test_a_pass_is_known_before_it_is_timed_where_responses_grow() -> None:
    """Timed every 80 tokens; the mean of so few and old ones would be far behind."""
    costs = PassCosts()
    for context in range(0, 1000, 80):
        costs.note_plain(8, context, 0.1 + 0.00005 * context)
    assert costs.plain(8, 1040) == pytest.approx(0.152, rel=0.01)
    assert costs.plain(8, 0) == pytest.approx(0.1, rel=0.05)  # the next batch


def test_noise_of_a_few_passes_shows_no_slope() -> None:
    chance = random.Random(0)
    costs = PassCosts()
    for context in range(4):
        costs.note_plain(8, context, 0.1 * chance.uniform(0.9, 1.1))
    assert costs.plain(8, 1000) == pytest.approx(0.1, rel=0.2)


def test_one_slow_pass_counts_for_little() -> None:
    costs = PassCosts()
    for context in range(10):
        costs.note_plain(8, context, 0.1)
    costs.note_plain(8, 10, 5.0)
    assert costs.plain(8, 11) < 0.12


def test_other_numbers_of_rows_are_known_by_the_next_that_was_timed() -> None:
    costs = PassCosts()
    costs.note_plain(8, 0, 0.8)
    assert costs.is_timed(15) and not costs.is_timed(16)
    assert costs.plain(12, 0) == pytest.approx(1.2)
    assert costs.plain(300, 0) == costs.plain(8, 0)


@pytest.mark.parametrize("fixed", [0.0, 0.03])
def test_drafts_cost_what_passes_take_more(fixed: float) -> None:
    costs = PassCosts()
    for n in range(120):
        context, num_drafted = 10 * n, 4 + n % 29
        plain = 0.1 + 0.00005 * context
        if n % 6 == 0:
            costs.note_plain(8, context, plain)
        else:
            seconds = plain + fixed + 0.004 * num_drafted
            costs.note_drafts(PassShape(8, 8, context), num_drafted, seconds)
    found, each = costs.drafts(8, 1200)
    assert each == pytest.approx(0.004, rel=0.1)
    assert found == pytest.approx(fixed, abs=0.005)


def test_drafts_of_one_length_cost_what_was_expected_and_the_rest_is_fixed() -> None:
    costs = PassCosts()
    costs.note_plain(8, 0, 0.1)
    for _ in range(20):
        costs.note_drafts(PassShape(8, 8, 0), 16, 0.1 + 0.12)
    fixed, each = costs.drafts(8, 0)
    assert fixed + 16 * each == pytest.approx(0.12, rel=0.05)
    assert each == pytest.approx(0.3 * 0.1 / 8, rel=0.2)
    costs.forget_drafts(8)
    assert costs.drafts(8, 0) == pytest.approx((0, 0.3 * 0.1 / 8), abs=1e-6)


def batch_of(lengths: list[int], costs: PassCosts) -> float:
    """Saved seconds of a batch without drafts; a pass takes 40 ms, each row 1 ms, and 20 ms more
    for every 1,000 tokens of context.
    """
    batch = BatchSeconds(100)
    for n in range(max(lengths)):
        live = sum(n < length for length in lengths)
        seconds = 0.04 + live * (0.001 + 0.00002 * (100 + n))
        shape = PassShape(live, live, 100 + n)
        batch.note_plain(shape, 1, seconds)
        costs.note_plain(live, 100 + n, seconds)
    return batch.saved(lengths, costs.plain)


def test_a_batch_without_drafts_has_saved_nothing_whatever_the_costs_say() -> None:
    """A row of 130 costs more than one of 250; costs are by power of two."""
    lengths = [n // 2 for n in range(8, 264)]
    costs = PassCosts()
    for _ in range(3):
        assert batch_of(lengths, costs) == pytest.approx(0, abs=0.15)


def test_what_was_spent_otherwise_is_not_saved() -> None:
    costs = PassCosts()
    costs.note_plain(2, 0, 0.4)
    batch = BatchSeconds(0)
    batch.note_plain(PassShape(2, 2, 0), 1, 0.5)  # slower than was known
    batch.spend(0.75)
    assert batch.saved([5, 5], costs.plain) == pytest.approx(5 * 0.5 - 1.25)
