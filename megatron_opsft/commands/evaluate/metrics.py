"""The paper's metrics of one benchmark and overall, from stored samples alone.

Shapes: P problems, N samples of each, D draws (rows of problem counts). Every metric is computed
for D weightings of the problems at once: a row of ones gives the metric itself, a row of bootstrap
counts gives it on that resample, so that a value and its interval come from the same code. Units:
shares in [0, 1], tokens with the end token; efficiency as `efficiency` says.
Source: the paper's section on evaluation, its appendix on the coefficient of variation, and, for
pass@k, Chen et al. 2021 (arXiv 2107.03374), equation 1.

Intervals are 95 % percentile intervals by bootstrap over problems: they are what an evaluation
samples from a population, and the N samples of one problem stay together. Two models on the same
counts are a paired bootstrap (Efron and Tibshirani 1993, chapters 13 and 8). With few problems they
are too narrow: at 95 %, true coverage is 0.82-0.86 of 5 and 0.91-0.93 of 30.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from megatron_opsft.commands.report.table import Estimate
from megatron_opsft.data.stored_samples import StoredSample

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

NUM_RESAMPLES, SEED, LEVEL = 2000, 0, 0.95
FEW_PROBLEMS = 60  # from here on, coverage is within about a point of the level
QUANTILES = {"median_tokens": 0.5, "p95_tokens": 0.95}
_BUDGET_METRICS = ("accuracy", "mean_tokens", "norm_std", "truncated_share")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleGrid:
    """All samples of one benchmark: problems in order of their ids, samples of their indices.

    tokens_PN: int64; correct_PN, finished_PN, answered_PN: bool; all [P, N].
    """

    tokens_PN: Counts
    correct_PN: NDArray[np.bool_]
    finished_PN: NDArray[np.bool_]
    answered_PN: NDArray[np.bool_]

    @property
    def num_problems(self) -> int:
        """P."""
        return self.tokens_PN.shape[0]

    @property
    def samples_per_problem(self) -> int:
        """N."""
        return self.tokens_PN.shape[1]

    def cut_at(self, budget: int) -> "SampleGrid":
        """The grid had generation stopped after `budget` tokens: a longer response is unfinished,
        wrong and `budget` tokens long, and one that fits stays as it is. Whether a cut response
        already held its answer is not asked, as in the paper's truncation.
        """
        fits_PN = self.tokens_PN <= budget
        return replace(
            self,
            tokens_PN=np.minimum(self.tokens_PN, budget),
            correct_PN=self.correct_PN & fits_PN,
            finished_PN=self.finished_PN & fits_PN,
            answered_PN=self.answered_PN & fits_PN,
        )


def arrange(samples: Sequence[StoredSample]) -> SampleGrid:
    """The samples as arrays, the same for every order of `samples`; each is there once.

    `ValueError` where problems have different numbers of samples, or there are none: an evaluation
    that is not finished has no metrics.
    """
    counts = Counter(sample.problem_id for sample in samples)
    if len(numbers := set(counts.values())) != 1:
        raise ValueError(
            f"problems have different numbers of samples: {sorted(numbers)}"
        )
    ordered = sorted(
        samples, key=lambda sample: (sample.problem_id, sample.sample_index)
    )

    def grid(name: str, dtype: type) -> NDArray[Any]:
        return np.array([getattr(s, name) for s in ordered], dtype=dtype).reshape(
            len(counts), -1
        )

    return SampleGrid(
        tokens_PN=grid("num_tokens", np.int64),
        correct_PN=grid("correct", np.bool_),
        finished_PN=grid("finished", np.bool_),
        answered_PN=grid("has_answer", np.bool_),
    )


def measure(grid: SampleGrid, counts_DP: Counts) -> dict[str, Floats]:
    """Metric -> [D]: each where problem p is there counts_DP[d, p] times.

    A row of counts adds up to P. All but the token quantiles and the efficiency are means over
    problems, which are means over samples too, as N is the same for all.
    """
    means = mean_over_problems(problem_values(grid), counts_DP)
    quantiles = token_quantiles(grid, counts_DP, list(QUANTILES.values()))
    metrics = {}
    for name, value in means.items():
        metrics[name] = value
        if name == "mean_tokens":
            metrics |= dict(zip(QUANTILES, quantiles, strict=True))
            metrics["efficiency"] = efficiency(means["accuracy"], value)
    return metrics


def measure_at(grid: SampleGrid, budget: int, counts_DP: Counts) -> dict[str, Floats]:
    """Metric -> [D] of the samples cut at `budget`: accuracy, mean tokens, NormStd if there is any,
    truncated share and efficiency.
    """
    values = problem_values(grid.cut_at(budget))
    metrics = mean_over_problems(
        {n: values[n] for n in values if n in _BUDGET_METRICS}, counts_DP
    )
    metrics["efficiency"] = efficiency(metrics["accuracy"], metrics["mean_tokens"])
    return metrics


def problem_values(grid: SampleGrid) -> dict[str, Floats]:
    """Metric -> [P]: the value of each problem, of those metrics that are means over problems."""
    correct_P = grid.correct_PN.sum(axis=1)
    values = {
        "accuracy": grid.correct_PN.mean(axis=1),
        "pass_at_n": grid.correct_PN.any(axis=1).astype(np.float64),
    }
    for k in pass_ks(grid.samples_per_problem):
        values[f"pass_at_{k}"] = pass_at_k(correct_P, grid.samples_per_problem, k)
    values["mean_tokens"] = grid.tokens_PN.mean(axis=1)
    if grid.samples_per_problem > 1:  # one length has no spread
        values["norm_std"] = grid.tokens_PN.std(axis=1) / grid.tokens_PN.mean(axis=1)
    values["truncated_share"] = 1.0 - grid.finished_PN.mean(axis=1)
    values["no_answer_share"] = 1.0 - grid.answered_PN.mean(axis=1)
    return values


def pass_ks(num_samples: int) -> list[int]:
    """1, 2, 4, ... and N itself."""
    powers = [1 << e for e in range(num_samples.bit_length())]
    return sorted({*(k for k in powers if k <= num_samples), num_samples})


def pass_at_k(correct_P: NDArray[np.integer], num_samples: int, k: int) -> Floats:
    """[P]: the chance that k of the N samples, drawn without replacement, hold a correct one.

    1 - C(N - c, k) / C(N, k), of exact integers; unbiased for the chance that k fresh samples do.
    """
    total = comb(num_samples, k)
    by_correct = [
        1.0 - comb(num_samples - c, k) / total for c in range(num_samples + 1)
    ]
    return np.array(by_correct, dtype=np.float64)[correct_P]


def mean_over_problems(
    values_P: Mapping[str, Floats], counts_DP: Counts
) -> dict[str, Floats]:
    """Metric -> [D]: weighted means over problems."""
    stacked_PM = np.stack(list(values_P.values()), axis=1)
    means_DM = counts_DP.astype(np.float64) @ stacked_PM / stacked_PM.shape[0]
    return {name: means_DM[:, m] for m, name in enumerate(values_P)}


def token_quantiles(
    grid: SampleGrid, counts_DP: Counts, quantiles: Sequence[float]
) -> list[Floats]:
    """One [D] for each quantile of the lengths of all samples, as np.quantile (linear) has it."""
    order = np.argsort(grid.tokens_PN, axis=None, kind="stable")
    sorted_S, problem_S = (
        grid.tokens_PN.ravel()[order],
        order // grid.samples_per_problem,
    )
    ranks_S = np.arange(len(sorted_S))
    places_Q = np.asarray(quantiles) * (len(sorted_S) - 1)
    # Every row of counts adds up to P, so there are as many samples on each draw.
    rows = [
        np.interp(places_Q, ranks_S, np.repeat(sorted_S, row[problem_S]))
        for row in counts_DP
    ]
    return list(np.array(rows).T)


def efficiency(accuracy: Floats, mean_tokens: Floats) -> Floats:
    """Eff of the paper: accuracy in % over mean tokens, times 100 (59.0 % at 10,178: 0.58)."""
    return 1e4 * accuracy / mean_tokens


def combine(benchmarks: Sequence[Mapping[str, Floats]]) -> dict[str, Floats]:
    """Overall: the plain mean over benchmarks of each metric that all have; Eff is mean / mean."""
    names = [
        name for name in benchmarks[0] if all(name in metrics for metrics in benchmarks)
    ]
    means: dict[str, Floats] = {
        name: np.mean(np.stack([metrics[name] for metrics in benchmarks]), axis=0)
        for name in names
    }
    means["efficiency"] = efficiency(means["accuracy"], means["mean_tokens"])
    return means


def draw_counts(
    num_problems: int,
    name: str,
    *,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = SEED,
) -> Counts:
    """[1 + R, P]: how often each problem is there; row 0 is all ones, every row adds up to P.

    Depends on P, the benchmark's name and the seed alone: not on the model (that pairs models) nor
    on which other benchmarks there are.
    """
    generator = np.random.default_rng([seed, crc32(name.encode("utf-8"))])
    drawn_RP = generator.integers(num_problems, size=(num_resamples, num_problems))
    drawn_RP += np.arange(num_resamples)[:, None] * num_problems
    counts = np.bincount(drawn_RP.ravel(), minlength=num_resamples * num_problems)
    ones = np.ones((1, num_problems), dtype=np.int64)
    return np.concatenate([ones, counts.reshape(num_resamples, num_problems)])


def estimate(draws: Floats) -> Estimate:
    """Value and 95 % percentile interval of draws [1 + R] (row 0: the data as it is).

    Rounded to 10 digits, below which the order of a sum in some BLAS would show.
    """
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(draws[1:], [tail, 100 - tail])
    return Estimate(value=_round(draws[0]), low=_round(low), high=_round(high))


def _round(value: np.float64) -> float:
    return float(f"{value:.10g}") + 0.0  # no -0.0
