"""The overthinking meter in an evaluation: values by hand, and on resamples of the problems."""

from dataclasses import replace

import numpy as np
import pytest
from eval_samples import stored

from megatron_opsft.commands.evaluate.metrics import arrange, draw_counts, measure
from megatron_opsft.data.stored_samples import StoredSample
from megatron_opsft.records import Thinking, TokenUse

NAMES = {
    "mean_thinking_tokens": 5.0,
    "mean_answer_tokens": 19 / 3,
    "mean_doubts": 2.0,
    "repeated_share": pytest.approx(0.2),
    "mean_leaked_tokens": 1.0,
    "mean_tokens_to_right": 4.0,
    "after_right_share": 16 / 24,
    "mean_restated": 1.5,
}


def samples() -> list[StoredSample]:
    """Of p both responses state the right answer, of q none; one of q was cut off."""
    used = [
        TokenUse(Thinking.CLOSED, 6, 3, 1, 4, 0.6, 3),
        TokenUse(Thinking.CLOSED, 5, 5, 2, 2, 0.0, 0),
        TokenUse(Thinking.CLOSED, 4),
        TokenUse(Thinking.OPEN, 90),
    ]
    made = [stored("p", 0, 10), stored("p", 1, 14), stored("q", 0, 10)]
    made.append(stored("q", 1, 90, finished=False))
    return [replace(one, token_use=use) for one, use in zip(made, used, strict=True)]


def test_the_meter_of_an_evaluation_by_hand() -> None:
    metrics = measure(arrange(samples()), np.ones((1, 2), dtype=np.int64))
    assert {name: metrics[name][0] for name in NAMES} == NAMES


def test_problems_count_as_often_as_a_draw_has_them() -> None:
    """p twice: its responses alone. q twice: nothing states the answer, so the whole's value."""
    metrics = measure(arrange(samples()), np.array([[2, 0], [0, 2]]))
    assert list(metrics["mean_thinking_tokens"]) == [5.5, 4.0]
    assert list(metrics["after_right_share"]) == [16 / 24, 16 / 24]
    assert list(metrics["mean_doubts"]) == [3.0, 0.0]
    draws = measure(arrange(samples()), draw_counts(2, "gsm8k"))["mean_answer_tokens"]
    assert set(np.round(draws, 6)) == {6.5, 6.0, 6.333333}


def test_samples_of_earlier_versions_have_no_meter() -> None:
    metrics = measure(arrange([stored("p", 0, 10), stored("q", 0, 9)]), np.ones((1, 2), dtype=int))
    assert not set(NAMES) & set(metrics)
    cut = arrange(samples()).cut_at(8)
    assert not set(NAMES) & set(measure(cut, np.ones((1, 2), dtype=int)))
