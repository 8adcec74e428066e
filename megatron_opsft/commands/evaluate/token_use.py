"""The overthinking meter's metrics of one benchmark: where the tokens of finished responses went.

Shapes and draws are those of `metrics`. Each metric is a ratio of two sums over responses, so that
problems whose responses never state the right answer count nowhere else.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_opsft.data.stored_samples import StoredSample
from megatron_opsft.methods.facts import sums_of_token_use

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


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

    samples_of: the samples of each problem. Names and meanings are those of metrics.jsonl.
    """
    by_problem = list(map(_sums_of_problem, samples_of))
    sums = {}
    for name in by_problem[0]:
        over_P = np.array([sums_of[name][0] for sums_of in by_problem])
        under_P = np.array([sums_of[name][1] for sums_of in by_problem])
        if under_P.sum() > 0:
            sums[name] = TokenSums(over_P=over_P, under_P=under_P)
    return sums


def _sums_of_problem(samples: Sequence[StoredSample]) -> dict[str, tuple[float, int]]:
    """Return metric -> its sums over the finished samples of one problem."""
    used = []
    for sample in samples:
        if sample.finished and sample.token_use is not None:
            used.append((sample.token_use, sample.num_tokens))
    return sums_of_token_use(used)
