"""Metrics against implementations written here from the definitions; token budgets by hand; the
coverage of intervals.
"""

import itertools
import math
import statistics

import numpy as np
import pytest
from eval_samples import measure_samples, stored

from megatron_opsft.evaluate.benchmarks import StoredSample
from megatron_opsft.evaluate.inputs import default_budgets
from megatron_opsft.evaluate.metrics import (
    arrange,
    combine,
    draw_counts,
    estimate,
    mean_over_problems,
    measure,
    measure_at,
)
from megatron_opsft.records import Outcome

SILENT = (Outcome.NO_ANSWER, Outcome.UNFINISHED)


def sample(problem: str, index: int, tokens: int, correct: bool = False) -> StoredSample:
    others = (None, Outcome.NO_ANSWER, Outcome.TIMEOUT, Outcome.UNFINISHED)
    outcome = None if correct else others[tokens % 4]
    return stored(problem, index, tokens, correct, finished=tokens < 900, outcome=outcome)


def random_samples(seed: int, num_problems: int, num_samples: int) -> list[StoredSample]:
    rng = np.random.default_rng(seed)
    skill = rng.random(num_problems)
    return [
        sample(f"p{p}", n, int(rng.integers(1, 1000)), bool(rng.random() < skill[p]))
        for p in range(num_problems)
        for n in range(num_samples)
    ]


def by_definition(samples: list[StoredSample]) -> dict[str, float]:
    """Plain Python, a problem at a time; pass@k by listing all subsets of k samples."""
    problems: dict[str, list[StoredSample]] = {}
    for one in samples:
        problems.setdefault(one.problem_id, []).append(one)
    rows, fmean = list(problems.values()), statistics.fmean
    lengths = sorted(one.num_tokens for one in samples)
    num, n = len(samples), len(rows[0])
    expected = {
        "accuracy": sum(one.correct for one in samples) / num,
        "pass_at_n": sum(any(one.correct for one in row) for row in rows) / len(rows),
        "mean_tokens": sum(lengths) / num,
        "median_tokens": statistics.median(lengths),
        "truncated_share": sum(not one.finished for one in samples) / num,
        "no_answer_share": sum(one.outcome in SILENT for one in samples) / num,
    }
    if n > 1:  # of one length there is no spread
        tokens = [[one.num_tokens for one in row] for row in rows]
        expected["norm_std"] = fmean(statistics.pstdev(row) / fmean(row) for row in tokens)
    place = 0.95 * (num - 1)
    low, high = lengths[math.floor(place)], lengths[math.ceil(place)]
    expected["p95_tokens"] = low + (place - math.floor(place)) * (high - low)
    expected["efficiency"] = 100 * (100 * expected["accuracy"]) / expected["mean_tokens"]
    for k in sorted({k for k in (1, 2, 4, 8, 16) if k <= n} | {n}):
        subsets = [itertools.combinations([one.correct for one in row], k) for row in rows]
        expected[f"pass_at_{k}"] = fmean(fmean(map(any, each)) for each in subsets)
    return expected


@pytest.mark.parametrize(("problems", "samples"), [(1, 1), (23, 5), (40, 8)])
def test_metrics_match_definitions(problems: int, samples: int) -> None:
    drawn = random_samples(problems, problems, samples)
    assert measure_samples(drawn) == pytest.approx(by_definition(drawn), rel=1e-12)


def test_weights_are_copies_of_problems() -> None:
    """A resample's metrics are those of samples in which its problems really are repeated."""
    drawn = random_samples(3, 9, 4)
    grid = arrange(drawn)
    counts = np.array([[2, 0, 1, 0, 3, 0, 1, 1, 1], [9, 0, 0, 0, 0, 0, 0, 0, 0], [1] * 9])
    metrics = measure(grid, counts)
    for d, row in enumerate(counts):
        copies = [
            sample(f"{one.problem_id}.{copy}", one.sample_index, one.num_tokens, one.correct)
            for one in drawn
            for copy in range(row[int(one.problem_id[1:])])
        ]
        found = {name: value[d] for name, value in metrics.items()}
        assert found == pytest.approx(by_definition(copies))


def test_overall_is_the_mean_over_benchmarks_and_its_efficiency_a_ratio_of_means() -> None:
    many, few = random_samples(1, 30, 2), random_samples(2, 3, 8)
    metrics = [measure_samples(many), measure_samples(few)]
    overall = combine([{k: np.array([v]) for k, v in one.items()} for one in metrics])
    assert "pass_at_8" not in overall  # only one of them has it
    for name in ("accuracy", "pass_at_n", "pass_at_2", "mean_tokens", "p95_tokens", "norm_std"):
        assert overall[name][0] == pytest.approx((metrics[0][name] + metrics[1][name]) / 2)
    ratio = 1e4 * overall["accuracy"][0] / overall["mean_tokens"][0]
    assert overall["efficiency"][0] == pytest.approx(ratio)
    mean_of_ratios = (metrics[0]["efficiency"] + metrics[1]["efficiency"]) / 2
    assert abs(mean_of_ratios - ratio) > 1e-3


# Problem a: 100 right, 300 right. Problem b: 200 wrong, 400 cut off by the limit.
GRID = arrange(
    [stored("a", 0, 100, True), stored("a", 1, 300, True)]
    + [stored("b", 0, 200), stored("b", 1, 400, finished=False)]
)
BY_HAND = {
    # budget: accuracy, mean tokens, NormStd, truncated share
    99: (0 / 4, 99.0, 0.0, 4 / 4),
    100: (1 / 4, 100.0, 0.0, 3 / 4),
    299: (1 / 4, (100 + 299 + 200 + 299) / 4, (99.5 / 199.5 + 49.5 / 249.5) / 2, 2 / 4),
    300: (2 / 4, (100 + 300 + 200 + 300) / 4, (100 / 200 + 50 / 250) / 2, 1 / 4),
    400: (2 / 4, 250.0, (100 / 200 + 100 / 300) / 2, 1 / 4),
}


@pytest.mark.parametrize("budget", BY_HAND)
def test_budget_by_hand(budget: int) -> None:
    found = measure_at(GRID, budget, np.ones((1, 2), dtype=np.int64))
    names = ("accuracy", "mean_tokens", "norm_std", "truncated_share")
    expected = dict(zip(names, BY_HAND[budget], strict=True))
    expected["efficiency"] = 1e4 * expected["accuracy"] / expected["mean_tokens"]
    assert {name: value[0] for name, value in found.items()} == pytest.approx(expected)


def test_default_budgets() -> None:
    assert default_budgets(32768) == (1024, 2048, 4096, 8192, 16384, 32768)
    assert default_budgets(350) == (8, 16, 32, 64, 128, 256, 350)
    assert default_budgets(1) == (1,)


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
        interval = estimate(mean_over_problems({"a": correct.mean(axis=1)}, counts)["a"])
        assert interval.low is not None and interval.high is not None
        covered += interval.low <= 0.5 <= interval.high
    assert least <= covered / 2000 <= most
