"""Metrics against implementations written here from the definitions."""

import itertools
import math
import statistics

import numpy as np
import pytest
from eval_samples import measure_samples

from megatron_opsft.evaluate.metrics import (
    ScoredSample,
    arrange,
    combine,
    measure,
    pass_at_k,
    pass_ks,
)


def sample(problem: str, index: int, tokens: int, correct: bool = False) -> ScoredSample:
    return ScoredSample(
        problem_id=problem,
        sample_index=index,
        num_tokens=tokens,
        correct=correct,
        finished=tokens < 900,
        has_answer=correct or tokens % 3 == 0,
    )


def random_samples(seed: int, num_problems: int, num_samples: int) -> list[ScoredSample]:
    rng = np.random.default_rng(seed)
    skill = rng.random(num_problems)
    return [
        sample(f"p{p}", n, int(rng.integers(1, 1000)), bool(rng.random() < skill[p]))
        for p in range(num_problems)
        for n in range(num_samples)
    ]


def by_definition(samples: list[ScoredSample]) -> dict[str, float]:
    """Plain Python, a problem at a time; pass@k by listing all subsets of k samples."""
    problems: dict[str, list[ScoredSample]] = {}
    for one in samples:
        problems.setdefault(one.problem_id, []).append(one)
    lengths = sorted(one.num_tokens for one in samples)
    num, n = len(samples), len(next(iter(problems.values())))
    expected = {
        "accuracy": sum(one.correct for one in samples) / num,
        "pass_at_n": sum(any(one.correct for one in row) for row in problems.values())
        / len(problems),
        "mean_tokens": sum(lengths) / num,
        "median_tokens": statistics.median(lengths),
        "truncated_share": sum(not one.finished for one in samples) / num,
        "no_answer_share": sum(not one.has_answer for one in samples) / num,
    }
    if n > 1:  # of one length there is no spread
        expected["norm_std"] = statistics.fmean(
            statistics.pstdev(one.num_tokens for one in row)
            / statistics.fmean(one.num_tokens for one in row)
            for row in problems.values()
        )
    place = 0.95 * (num - 1)
    low, high = lengths[math.floor(place)], lengths[math.ceil(place)]
    expected["p95_tokens"] = low + (place - math.floor(place)) * (high - low)
    expected["efficiency"] = 100 * (100 * expected["accuracy"]) / expected["mean_tokens"]
    for k in sorted({k for k in (1, 2, 4, 8, 16) if k <= n} | {n}):
        per_problem = []
        for row in problems.values():
            subsets = list(itertools.combinations([one.correct for one in row], k))
            per_problem.append(sum(any(subset) for subset in subsets) / len(subsets))
        expected[f"pass_at_{k}"] = statistics.fmean(per_problem)
    return expected


@pytest.mark.parametrize(("problems", "samples"), [(1, 1), (7, 4), (23, 5), (40, 8), (3, 10)])
def test_metrics_match_definitions(problems: int, samples: int) -> None:
    drawn = random_samples(problems, problems, samples)
    assert measure_samples(drawn) == pytest.approx(by_definition(drawn), rel=1e-12)


@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_pass_at_k_matches_brute_force(n: int) -> None:
    for k in range(1, n + 1):
        for correct in range(n + 1):
            subsets = list(itertools.combinations([i < correct for i in range(n)], k))
            share = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(np.array([correct]), n, k)[0] == pytest.approx(share, abs=1e-15)


def test_pass_at_k_is_unbiased() -> None:
    """The mean over c ~ Binomial(N, p), exactly, is the chance of one in k fresh samples."""
    n, p = 16, 0.13
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    for k in pass_ks(n):
        expected = float(np.dot(chances, pass_at_k(np.arange(n + 1), n, k)))
        assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def test_pass_ks() -> None:
    assert pass_ks(1) == [1]
    assert pass_ks(5) == [1, 2, 4, 5]
    assert pass_ks(64) == [1, 2, 4, 8, 16, 32, 64]
    with pytest.raises(ValueError, match="pass@6 of 5"):
        pass_at_k(np.array([1]), 5, 6)


def test_weights_are_copies_of_problems() -> None:
    """A resample's metrics are those of samples in which its problems really are repeated."""
    drawn = random_samples(3, 9, 4)
    grid = arrange(drawn)
    counts = np.array([[2, 0, 1, 0, 3, 0, 1, 1, 1], [9, 0, 0, 0, 0, 0, 0, 0, 0], [1] * 9])
    metrics = measure(grid, counts)
    for d, row in enumerate(counts):
        copies = []
        for p, times in enumerate(row):
            own = [one for one in drawn if one.problem_id == grid.problem_ids[p]]
            for copy in range(times):
                copies += [
                    sample(f"{p}.{copy}", one.sample_index, one.num_tokens, one.correct)
                    for one in own
                ]
        expected = by_definition(copies)
        assert {name: value[d] for name, value in metrics.items()} == pytest.approx(expected)


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


def test_unfinished_evaluations_have_no_metrics() -> None:
    with pytest.raises(ValueError, match="no sample"):
        arrange([])
    with pytest.raises(ValueError, match=r"different numbers of samples: \[1, 2\]"):
        arrange([sample("a", 0, 5), sample("a", 1, 5), sample("b", 0, 5)])
    with pytest.raises(ValueError, match="problem a: sample 0 twice"):
        arrange([sample("a", 0, 5), sample("a", 0, 6)])
    with pytest.raises(ValueError, match="problem a: a sample without tokens"):
        arrange([sample("a", 0, 0)])
