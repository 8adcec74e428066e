"""Formulas of the surrogates and KL estimators.

Pure functions of float32 vectors that have one value for each response token; only `log_probs` has
a gradient. Surrogates are to be maximised, divergences minimised.

log_probs: log-probabilities under the current policy p; old: under the policy that sampled;
reference: under the reference model. advantages: the response's advantage, repeated for each token.
mean_ratio: the mean of log p - log old over the token's response; counts: that response's tokens.
"""

import torch
from torch import Tensor

from megatron_opsft.methods.objective import KlEstimator

# Beyond it k3 continues as a straight line: e^40 squared, as in a gradient's norm, is still finite
# in float32.
_MAX_LOG_RATIO = 40.0


def token_clip(
    log_probs: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    low: float,
    high: float,
    dual: float | None = None,
) -> Tensor:
    """Return min(r A, clip(r, 1 - low, 1 + high) A) with r = p / old, for A < 0 at least dual A."""
    ratio = (log_probs - old).exp()
    clipped_ratio = ratio.clamp(1 - low, 1 + high)
    value = torch.minimum(ratio * advantages, clipped_ratio * advantages)
    if dual is None:
        return value
    return torch.where(advantages < 0, torch.maximum(value, dual * advantages), value)


def sequence_clip(
    mean_ratio: Tensor, counts: Tensor, advantages: Tensor, *, low: float, high: float
) -> Tensor:
    """Return `token_clip` with r = exp(mean_t (log p - log old)), divided among the n tokens of the
    response.
    """
    zeros = torch.zeros_like(mean_ratio)
    return token_clip(mean_ratio, zeros, advantages, low=low, high=high) / counts


def squared_log_ratio(
    log_probs: Tensor,
    mean_ratio: Tensor,
    counts: Tensor,
    advantages: Tensor,
    *,
    tau: float,
) -> Tensor:
    """Return A log p - tau / 2 (sum_t (log p - log old))^2, the square divided among the n tokens
    of the response.
    """
    return advantages * log_probs - 0.5 * tau * counts * mean_ratio.square()


def kl_estimate(estimator: KlEstimator, log_probs: Tensor, reference: Tensor) -> Tensor:
    """Return an estimate of KL(p || ref) from tokens that p sampled.

    With d = log ref - log p: k1 = -d, k2 = d^2 / 2, k3 = e^d - d - 1. Above d = 40 k3 continues as
    a straight line with the slope at 40: finite, and its gradient never vanishes.
    """
    d = reference - log_probs
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return 0.5 * d.square()
    bounded = d.clamp(max=_MAX_LOG_RATIO)
    slope = bounded.expm1()
    return slope - bounded + slope * (d - bounded)
