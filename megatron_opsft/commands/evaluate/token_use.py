"""The overthinking meter's metrics of one benchmark: where the tokens of finished responses went.

Shapes and draws are those of `metrics`. Each metric is a ratio of two sums over responses, so that
problems whose responses never state the right answer count nowhere else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_opsft.data.stored_samples import StoredSample
from megatron_opsft.records import TokenUse

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

_MEANS: dict[str, Callable[[TokenUse, int], float]] = {
    "mean_thinking_tokens": lambda use, num_tokens: use.num_thinking,
    "mean_answer_tokens": lambda use, num_tokens: num_tokens - use.num_thinking,
    "mean_doubts": lambda use, num_tokens: use.num_doubts,
    "repeated_share": lambda use, num_tokens: use.repeated_share,
    "mean_leaked_tokens": lambda use, num_tokens: use.num_leaked,
}
"""Metrics of every finished response: name -> its value for one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSums:
    """What a metric is made of: for each problem, the two sums whose ratio it is."""

    over_P: Floats
    under_P: Floats

    def ratio(self, counts_DP: Counts) -> Floats:
        """Return [D]: the ratio on each draw; on a draw that has nothing below, that of all."""
        weights_DP = counts_DP.astype(np.float64)
        under_D = weights_DP @ self.under_P
        whole = self.over_P.sum() / self.under_P.sum()
        ratios = np.full(len(under_D), whole)
        np.divide(weights_DP @ self.over_P, under_D, out=ratios, where=under_D > 0)
        return ratios


def token_sums(samples_of: Sequence[Sequence[StoredSample]]) -> dict[str, TokenSums]:
    """Return metric -> its sums, for the metrics that some response has; {} for an evaluation of an
    earlier version, whose samples say nothing of it.

    samples_of: the samples of each problem. Names and meanings are those of metrics.jsonl
    (`methods.facts.describe_token_use`).
    """
    by_problem = list(map(_sums_of_problem, samples_of))
    sums = {}
    for name in _NAMES:
        over_P = np.array([sums_of[name][0] for sums_of in by_problem])
        under_P = np.array([sums_of[name][1] for sums_of in by_problem])
        if under_P.sum() > 0:
            sums[name] = TokenSums(over_P=over_P, under_P=under_P)
    return sums


def _sums_of_problem(samples: Sequence[StoredSample]) -> dict[str, tuple[float, float]]:
    """Return metric -> the sums above and below the line, over the samples of one problem."""
    read = []
    for sample in samples:
        if sample.finished and sample.token_use is not None:
            read.append((sample.token_use, sample.num_tokens))
    sums: dict[str, tuple[float, float]] = {}
    for name, value in _MEANS.items():
        sums[name] = sum(value(use, length) for use, length in read), len(read)
    places = [
        (use.first_right, length) for use, length in read if use.first_right is not None
    ]
    num_before = sum(place for place, _ in places)
    num_tokens = sum(length for _, length in places)
    num_restated = sum(use.num_restated for use, _ in read)
    sums["mean_tokens_to_right"] = num_before, len(places)
    sums["after_right_share"] = num_tokens - num_before, num_tokens
    sums["mean_restated"] = num_restated, len(places)
    return sums


_NAMES = (*_MEANS, "mean_tokens_to_right", "after_right_share", "mean_restated")
