"""Turn rewards into advantages. The values of a batch are one list for each group, in order.

Standard deviations divide by the count less one, as torch's do, unless a docstring says otherwise.
"""

import math
from collections.abc import Sequence
from itertools import chain
from statistics import fmean
from typing import Literal

Values = list[list[float]]
Whitening = Literal["none", "responses", "tokens"]


def group_centered(rewards: Sequence[float]) -> list[float]:
    """A = r - mean; exactly 0 where all rewards are equal."""
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def group_normalized(
    rewards: Sequence[float], epsilon: float = 1e-6, *, count_less: int = 1
) -> list[float]:
    """GRPO's A = (r - mean) / (std + epsilon); std divides by the count less `count_less`."""
    centered = group_centered(rewards)
    if not any(centered):
        return centered
    std = math.sqrt(math.fsum(a * a for a in centered) / (len(centered) - count_less))
    return [a / (std + epsilon) for a in centered]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """A_i = r_i - mean of the others."""
    scale = len(rewards) / (len(rewards) - 1)
    return [scale * a for a in group_centered(rewards)]


def z_score(values: Values) -> Values:
    """(v - mean) / std over all groups together; std divides by the count."""
    return whiten(values, values, "responses", count_less=0, floor=0.0)


def whiten(
    values: Values,
    lengths: Sequence[Sequence[float]],
    by: Whitening,
    *,
    count_less: int = 1,
    floor: float = 1e-8,
) -> Values:
    """Return (v - mean) / sqrt(variance + floor) over the whole batch; all 0 if all are equal.

    lengths: tokens of each response. by: "responses" counts each response once, "tokens" once for
    each of its tokens, "none" changes nothing. count_less: 1 for the unbiased variance.
    """
    if by == "none":
        return values
    all_values = list(chain.from_iterable(values))
    if min(all_values) == max(all_values):
        return [[0.0] * len(group) for group in values]
    weights: list[float] = [1] * len(all_values)
    if by == "tokens":
        weights = list(chain.from_iterable(lengths))
    weighted = list(zip(all_values, weights, strict=True))
    count = math.fsum(weights)
    mean = math.fsum(v * w for v, w in weighted) / count
    squares = math.fsum(w * (v - mean) ** 2 for v, w in weighted)
    scale = 1 / math.sqrt(squares / (count - count_less) + floor)
    whitened = []
    for group in values:
        whitened.append([scale * (value - mean) for value in group])
    return whitened
