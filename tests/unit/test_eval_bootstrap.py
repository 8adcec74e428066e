"""Intervals: against a slow bootstrap, and their coverage."""

import numpy as np
import pytest

from megatron_opsft.evaluate.metrics import (
    SampleGrid,
    combine,
    draw_counts,
    estimate,
    mean_over_problems,
    measure,
    problem_values,
)


def grid_of(tokens: np.ndarray, correct: np.ndarray) -> SampleGrid:
    return SampleGrid(
        problem_ids=tuple(f"p{p:05d}" for p in range(len(tokens))),
        tokens_PN=tokens.astype(np.int64),
        correct_PN=correct,
        finished_PN=np.ones_like(correct),
        answered_PN=correct,
    )


def draw_model(
    rng: np.random.Generator, difficulty: np.ndarray, num_samples: int, mean_tokens: float
) -> SampleGrid:
    """Harder problems are answered longer and less often right."""
    shape = (len(difficulty), num_samples)
    tokens = mean_tokens * np.exp(difficulty[:, None] + 0.3 * rng.normal(size=shape)) + 1
    return grid_of(tokens, rng.random(shape) < 1 / (1 + np.exp(2 * difficulty[:, None] - 1)))


def test_interval_matches_a_bootstrap_that_copies_problems() -> None:
    rng = np.random.default_rng(0)
    grid = draw_model(rng, rng.normal(size=40), 8, 500)
    found = measure(grid, draw_counts(40, "x", num_resamples=4000))
    medians, accuracies = [], []
    for _ in range(4000):
        chosen = rng.integers(40, size=40)
        medians.append(np.median(grid.tokens_PN[chosen]))
        accuracies.append(grid.correct_PN[chosen].mean())
    for name, slow in (("median_tokens", medians), ("accuracy", accuracies)):
        own = estimate(found[name])
        low, high = np.percentile(slow, [2.5, 97.5])
        assert own.low == pytest.approx(low, abs=0.05 * (high - low))
        assert own.high == pytest.approx(high, abs=0.05 * (high - low))


@pytest.mark.parametrize(
    ("problems", "least", "most"), [(5, 0.80, 0.88), (30, 0.90, 0.945), (60, 0.925, 0.96)]
)
def test_intervals_have_the_coverage_that_the_documentation_tells(
    problems: int, least: float, most: float
) -> None:
    """Of 95 % intervals, 2,000 evaluations of 8 samples; problems are of uniform difficulty, so
    that samples are not independent: resampling single ones would cover far less.
    """
    rng = np.random.default_rng(5)
    covered = 0
    for trial in range(2000):
        correct = rng.random((problems, 8)) < rng.random(problems)[:, None]
        counts = draw_counts(problems, "x", num_resamples=400, seed=trial)
        values = problem_values(grid_of(np.ones_like(correct), correct))
        interval = estimate(mean_over_problems({"a": values["accuracy"]}, counts)["a"])
        assert interval.low is not None and interval.high is not None
        covered += interval.low <= 0.5 <= interval.high
    assert least <= covered / 2000 <= most


def test_overall_resamples_within_each_benchmark() -> None:
    """The variance of a mean of B independent benchmarks is the sum of theirs over B squared."""
    rng = np.random.default_rng(3)
    draws = [
        measure(
            draw_model(rng, rng.normal(size=30), 4, 100), draw_counts(30, name, num_resamples=8000)
        )
        for name in ("a", "b", "c")
    ]
    overall = combine(draws)["accuracy"][1:].var()
    assert overall == pytest.approx(sum(d["accuracy"][1:].var() for d in draws) / 9, rel=0.06)
