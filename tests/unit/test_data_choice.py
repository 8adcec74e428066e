"""What goes into fixed data sets, by hand."""

import math
from collections import Counter

import pytest
from responses import facts

from megatron_opsft.errors import NonFiniteError
from megatron_opsft.make_data.chosen import shortest_correct
from megatron_opsft.make_data.step_entropy import skipped_steps, steps_of
from megatron_opsft.make_data.tokenskip import RATIOS, kept_words, ratio_of
from megatron_opsft.records import Outcome, Response


def response(num_tokens: int, correct: bool = True, finished: bool = True) -> Response:
    outcome = Outcome.CORRECT if correct else Outcome.WRONG
    return facts(num_tokens=num_tokens, outcome=outcome, finished=finished)


def test_crst_takes_the_shortest_correct_one() -> None:
    responses = [response(9), response(3, correct=False), response(5), response(5)]
    assert shortest_correct(responses, ["a", "b", "c", "d"]) == 2
    assert shortest_correct(responses[:2], ["a", "b"]) == 0
    assert shortest_correct([response(2, finished=False)], ["a"]) is None
    assert shortest_correct([response(2, correct=False)], ["a"]) is None


def test_crst_counts_equal_texts_once() -> None:
    assert shortest_correct([response(9), response(8), response(8)], ["a", "b", "b"]) == 1
    assert shortest_correct([response(9), response(8)], ["a", "a"]) == 0


def test_steps_lie_between_separators() -> None:
    assert steps_of([5, 0, 6, 7, 0, 0, 8], {0}) == [range(0, 1), range(2, 4), range(6, 7)]
    assert steps_of([0, 0], {0}) == []


def test_the_sum_favours_short_steps_and_the_mean_flat_ones() -> None:
    steps = [range(0, 1), range(1, 5), range(5, 7)]
    entropies = [0.9, 0.3, 0.3, 0.3, 0.3, 0.8, 0.8]  # sums 0.9, 1.2, 1.6; means 0.9, 0.3, 0.8
    assert skipped_steps(steps, entropies, share=0.4) == {0}
    assert skipped_steps(steps, entropies, share=0.4, score="mean") == {1}
    assert skipped_steps(steps, entropies, share=0.8) == {0, 1}
    assert skipped_steps([], [], share=0.8) == set()


@pytest.mark.parametrize(("num_steps", "num_skipped"), [(1, 0), (4, 3), (5, 4), (9, 7), (10, 8)])
def test_four_fifths_of_the_steps_are_skipped_rounded_down(
    num_steps: int, num_skipped: int
) -> None:
    steps = [range(i, i + 1) for i in range(num_steps)]
    assert skipped_steps(steps, [1.0] * num_steps) == set(range(num_skipped))


def test_tokenskip_keeps_words_above_the_percentile() -> None:
    scores = [i / 10 for i in range(11)]  # the 31st percentile is 0.31
    assert kept_words(scores, [1] * 11, 0.7) == [False] * 4 + [True] * 7
    assert kept_words(scores, [1] * 11, 1.0) == [True] * 11
    # A word of nine tokens counts nine times: the 51st percentile is its own score, 0.5.
    assert kept_words([0.1, 0.5, 0.9], [1, 9, 1], 0.5) == [False, False, True]
    assert kept_words([], [], 0.5) == []
    with pytest.raises(NonFiniteError, match="NaN"):
        kept_words([0.1, math.nan, 0.9], [1, 9, 1], 0.5)


def test_tokenskip_ratios_are_drawn_evenly_and_again_the_same() -> None:
    drawn = [ratio_of(f"p{n}", 3) for n in range(3000)]
    assert drawn == [ratio_of(f"p{n}", 3) for n in range(3000)]
    counts = Counter(drawn)
    assert set(counts) == set(RATIOS)
    assert all(abs(count - 500) < 62 for count in counts.values())  # 3 standard deviations
