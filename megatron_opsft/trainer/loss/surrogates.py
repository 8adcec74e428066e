"""Surrogates and KL estimators: what a token's log-probability is worth, by formula.

Pure functions of float32 vectors over response tokens, equal in length; only `log_probs` has a
gradient. old: log-probabilities under the policy that sampled; reference: under the reference
model; advantages: each response's at every token of it. To be maximised, but for the divergence.
lengths: tokens of each response; the vectors are then of whole responses, or of the part of them
that `ResponsePart` says.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_opsft.methods.objective import KlEstimator

# Where k3 goes on straight: e^40 squared, as in a gradient's norm, is still a float32.
_MAX_LOG_RATIO = 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsePart:
    """Some tokens of each response, where the other ranks of a group have the others.

    numbers: int64, of which response each token is; total: elementwise sum over the group's ranks,
    differentiable.
    """

    numbers: Tensor
    total: Callable[[Tensor], Tensor]


def token_clip(
    log_probs: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    low: float,
    high: float,
    dual: float | None = None,
) -> Tensor:
    """min(r A, clip(r, 1 - low, 1 + high) A) with r = p / old; where A < 0 at least dual A."""
    ratio = (log_probs - old).exp()
    value = torch.minimum(
        ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    )
    if dual is None:
        return value
    return torch.where(advantages < 0, torch.maximum(value, dual * advantages), value)


def sequence_clip(
    log_probs: Tensor,
    old: Tensor,
    advantages: Tensor,
    lengths: Sequence[int],
    *,
    low: float,
    high: float,
    part: ResponsePart | None = None,
) -> Tensor:
    """`token_clip` with r = exp(mean_t (log p - log old)), shared out among the n tokens."""
    means, counts = mean_of_response(log_probs - old, lengths, part)
    return (
        token_clip(means, torch.zeros_like(means), advantages, low=low, high=high)
        / counts
    )


def squared_log_ratio(
    log_probs: Tensor,
    old: Tensor,
    advantages: Tensor,
    lengths: Sequence[int],
    *,
    tau: float,
    part: ResponsePart | None = None,
) -> Tensor:
    """A log p - tau / 2 (sum_t (log p - log old))^2, the square shared out among the n tokens."""
    means, counts = mean_of_response(log_probs - old, lengths, part)
    return advantages * log_probs - 0.5 * tau * counts * means.square()


def kl_estimate(estimator: KlEstimator, log_probs: Tensor, reference: Tensor) -> Tensor:
    """An estimate of KL(p || ref) from a token that p sampled. With d = log ref - log p:
    k1 = -d, k2 = d^2 / 2, k3 = e^d - d - 1, which above d = 40 goes on with the slope that it has
    there: finite, and never without a gradient.
    """
    d = reference - log_probs
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return 0.5 * d.square()
    bounded = d.clamp(max=_MAX_LOG_RATIO)
    slope = bounded.expm1()
    return slope - bounded + slope * (d - bounded)


def mean_of_response(
    values: Tensor, lengths: Sequence[int], part: ResponsePart | None = None
) -> tuple[Tensor, Tensor]:
    """At every token: the mean over its response, and that one's number of tokens."""
    if part is not None:
        counts_S = values.new_tensor(lengths)
        sums_S = part.total(
            torch.zeros_like(counts_S).index_add(0, part.numbers, values)
        )
        return (sums_S / counts_S)[part.numbers], counts_S[part.numbers]
    parts = values.split(list(lengths))
    means = [part.mean().expand_as(part) for part in parts]
    counts = [part.new_full(part.shape, len(part)) for part in parts]
    return torch.cat([values[:0], *means]), torch.cat([values[:0], *counts])
