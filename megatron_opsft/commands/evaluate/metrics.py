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
from dataclasses import dataclass, field, replace
from math import comb
from operator import attrgetter
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from megatron_opsft.commands.evaluate.token_use import TokenSums, token_sums
from megatron_opsft.commands.report.table import Estimate
from megatron_opsft.data.stored_samples import StoredSample

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Flags = NDArray[np.bool_]

NUM_RESAMPLES, SEED, LEVEL = 2000, 0, 0.95
FEW_PROBLEMS = 60  # from here on, coverage is within about a point of the level
QUANTILES = {"median_tokens": 0.5, "p95_tokens": 0.95}
_BUDGET_METRICS = ("accuracy", "mean_tokens", "norm_std", "truncated_share")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleGrid:
    """All samples of one benchmark: problems ordered by id, each one's samples by index."""

    tokens_PN: Counts
    """Length of each response, end token included."""
    correct_PN: Flags
    finished_PN: Flags
    """True for a response that ended by itself, not at the token limit."""
    answered_PN: Flags
    """True for a response with an answer, right or wrong."""
    token_sums: Mapping[str, TokenSums] = field(default_factory=dict)
    """The overthinking meter's metrics by name; of uncut responses alone."""

    @property
    def num_problems(self) -> int:
        """Number of problems, the P of the arrays."""
        return self.tokens_PN.shape[0]

    @property
    def samples_per_problem(self) -> int:
        """Number of samples of each problem, the N of the arrays."""
        return self.tokens_PN.shape[1]

    def cut_at(self, budget: int) -> "SampleGrid":
        """Return the grid as if generation had stopped after `budget` tokens.

        A longer response is unfinished, wrong and `budget` tokens long, and one that fits stays as
        it is. A cut response is wrong even if it already held its answer, as in the paper's
        truncation.
        """
        fits_PN = self.tokens_PN <= budget
        return replace(
            self,
            tokens_PN=np.minimum(self.tokens_PN, budget),
            correct_PN=self.correct_PN & fits_PN,
            finished_PN=self.finished_PN & fits_PN,
            answered_PN=self.answered_PN & fits_PN,
            token_sums={},
        )


def arrange(samples: Sequence[StoredSample]) -> SampleGrid:
    """Return the samples as arrays, the same for every order of `samples`; no sample comes twice.

    Errors: `ValueError` if problems have different numbers of samples, or there are none: an
    evaluation that is not finished has no metrics.
    """
    num_samples_of = Counter(sample.problem_id for sample in samples)
    numbers = set(num_samples_of.values())
    if len(numbers) != 1:
        raise ValueError(
            f"problems have different numbers of samples: {sorted(numbers)}"
        )
    shape = len(num_samples_of), -1  # P, N
    ordered = sorted(samples, key=attrgetter("problem_id", "sample_index"))
    num_samples = numbers.pop()
    return SampleGrid(
        token_sums=token_sums(
            [
                ordered[start : start + num_samples]
                for start in range(0, len(ordered), num_samples)
            ]
        ),
        tokens_PN=np.array([sample.num_tokens for sample in ordered]).reshape(shape),
        correct_PN=np.array([sample.correct for sample in ordered]).reshape(shape),
        finished_PN=np.array([sample.finished for sample in ordered]).reshape(shape),
        answered_PN=np.array([sample.has_answer for sample in ordered]).reshape(shape),
    )


def measure(grid: SampleGrid, counts_DP: Counts) -> dict[str, Floats]:
    """Return metric -> [D]: its values if problem p is there counts_DP[d, p] times.

    A row of counts adds up to P. All but the token quantiles and the efficiency are means over
    problems, which are means over samples too, as N is the same for all.
    """
    metrics = {}
    for name, mean in mean_over_problems(problem_values(grid), counts_DP).items():
        metrics[name] = mean
        if name == "mean_tokens":
            # In results.json the other metrics of tokens stand behind it.
            metrics |= token_quantiles(grid, counts_DP)
            metrics["efficiency"] = efficiency(metrics["accuracy"], mean)
    for name, sums in grid.token_sums.items():
        metrics[name] = sums.ratio(counts_DP)
    return metrics


def measure_at(grid: SampleGrid, budget: int, counts_DP: Counts) -> dict[str, Floats]:
    """Return metric -> [D] of the samples cut at `budget`: accuracy, mean tokens, NormStd if there
    is any, truncated share and efficiency.
    """
    values = problem_values(grid.cut_at(budget))
    metrics = mean_over_problems(
        {name: values[name] for name in _BUDGET_METRICS if name in values}, counts_DP
    )
    metrics["efficiency"] = efficiency(metrics["accuracy"], metrics["mean_tokens"])
    return metrics


def problem_values(grid: SampleGrid) -> dict[str, Floats]:
    """Return metric -> [P]: the value of each problem, for metrics that are means over problems."""
    num_samples = grid.samples_per_problem
    num_correct_P = grid.correct_PN.sum(axis=1)
    values = {
        "accuracy": grid.correct_PN.mean(axis=1),
        "pass_at_n": grid.correct_PN.any(axis=1).astype(np.float64),
    }
    for k in powers_up_to(num_samples):
        values[f"pass_at_{k}"] = pass_at_k(num_correct_P, num_samples, k)
    values["mean_tokens"] = grid.tokens_PN.mean(axis=1)
    if num_samples > 1:  # one length has no spread
        values["norm_std"] = grid.tokens_PN.std(axis=1) / values["mean_tokens"]
    values["truncated_share"] = 1.0 - grid.finished_PN.mean(axis=1)
    values["no_answer_share"] = 1.0 - grid.answered_PN.mean(axis=1)
    return values


def powers_up_to(most: int) -> list[int]:
    """Return 1, 2, 4, ... and `most` itself."""
    powers = {1 << exponent for exponent in range(most.bit_length())}
    return sorted(powers | {most})


def pass_at_k(num_correct_P: NDArray[np.integer], num_samples: int, k: int) -> Floats:
    """Return [P]: the chance that k of the N samples, drawn without replacement, hold a correct
    one.

    1 - C(N - c, k) / C(N, k), of exact integers; unbiased for the chance that k fresh samples do.
    num_correct_P: c of each problem.
    """
    total = comb(num_samples, k)
    chances = [1.0 - comb(wrong, k) / total for wrong in range(num_samples + 1)]
    num_wrong_P = num_samples - num_correct_P
    return np.array(chances)[num_wrong_P]


def mean_over_problems(
    values_P: Mapping[str, Floats], counts_DP: Counts
) -> dict[str, Floats]:
    """Return metric -> [D]: for each draw the mean over its problems.

    counts_DP: how often a draw has a problem; each row adds up to P.
    """
    stacked_PM = np.stack(list(values_P.values()), axis=1)
    means_DM = counts_DP.astype(np.float64) @ stacked_PM / stacked_PM.shape[0]
    return dict(zip(values_P, means_DM.T, strict=True))


def token_quantiles(grid: SampleGrid, counts_DP: Counts) -> dict[str, Floats]:
    """Return metric -> [D]: the `QUANTILES` of the lengths of all samples, S = P * N of them.

    Interpolates between two lengths as np.quantile does (linear).
    """
    order_S = np.argsort(grid.tokens_PN, axis=None, kind="stable")
    lengths_S = grid.tokens_PN.ravel()[order_S]
    problem_S = order_S // grid.samples_per_problem
    ranks_S = np.arange(len(lengths_S))
    quantile_ranks_Q = np.array([*QUANTILES.values()]) * (len(lengths_S) - 1)
    quantiles_DQ = []
    for counts_P in counts_DP:
        # Every row of counts adds up to P, so that each draw has S samples again.
        drawn_S = np.repeat(lengths_S, counts_P[problem_S])
        quantiles_DQ.append(np.interp(quantile_ranks_Q, ranks_S, drawn_S))
    return dict(zip(QUANTILES, np.array(quantiles_DQ).T, strict=True))


def efficiency(accuracy: Floats, mean_tokens: Floats) -> Floats:
    """Return the paper's Eff: accuracy in % over mean tokens, times 100.

    An accuracy of 59.0 % at 10,178 tokens gives 0.58.
    """
    return 1e4 * accuracy / mean_tokens


def combine(benchmarks: Sequence[Mapping[str, Floats]]) -> dict[str, Floats]:
    """Return the overall metrics: the plain mean over benchmarks of each metric that all have; Eff
    is that of the mean accuracy and the mean tokens.
    """
    means: dict[str, Floats] = {}
    for name in benchmarks[0]:
        if all(name in metrics for metrics in benchmarks):
            values_BD = [metrics[name] for metrics in benchmarks]
            means[name] = np.mean(values_BD, axis=0)
    means["efficiency"] = efficiency(means["accuracy"], means["mean_tokens"])
    return means


def draw_counts(
    num_problems: int,
    name: str,
    *,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = SEED,
) -> Counts:
    """Return [1 + R, P]: how often each problem is drawn.

    Row 0 is all ones, and every row adds up to P.

    Depends on P, the benchmark's name and the seed alone: not on the model (that pairs models) nor
    on which other benchmarks there are.
    """
    generator = np.random.default_rng([seed, crc32(name.encode("utf-8"))])
    drawn_RP = generator.integers(num_problems, size=(num_resamples, num_problems))
    counts_RP = [np.bincount(drawn_P, minlength=num_problems) for drawn_P in drawn_RP]
    return np.vstack([np.ones(num_problems, dtype=np.int64), *counts_RP])


def estimate(draws: Floats) -> Estimate:
    """Return value and 95 % percentile interval of draws [1 + R] (row 0: the data as it is).

    Both are rounded to 10 digits: further digits depend on the order in which a BLAS adds.
    """
    tail = 50 * (1 - LEVEL)
    interval = np.percentile(draws[1:], [tail, 100 - tail])
    # Adding 0.0 makes 0.0 of -0.0.
    value, low, high = (
        float(f"{number:.10g}") + 0.0 for number in (draws[0], *interval)
    )
    return Estimate(value=value, low=low, high=high)
