"""Losses of a micro-batch's R response tokens as functions of their log-probabilities: likelihood
with fixed weights, or any objective. Suffix C: the tokens of a chunk, a slice of the R tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.autograd.functional import vjp

from megatron_opsft.methods.objective import (
    Distillation,
    KlEstimator,
    Likelihood,
    Objective,
    SequenceClip,
    SquaredLogRatio,
    TokenClip,
)
from megatron_opsft.records import MicroBatch, record
from megatron_opsft.runtime.distributed import sum_over_context

_ALL = slice(None)
# Beyond it k3 continues as a straight line: e^40 squared, as in a gradient's norm, is still finite
# in float32.
_MAX_LOG_RATIO = 40.0


@dataclass(frozen=True, slots=True)
class WeightedLikelihood:
    """The losses weight * -log p."""

    weights_R: Tensor
    joins_tokens: ClassVar[bool] = False
    """True if a token's loss depends on its whole response."""

    def __call__(self, log_probs_R: Tensor) -> Tensor:
        """Return the losses, float32 [R], differentiable."""
        return -log_probs_R * self.weights_R

    def weights(self, log_probs_C: Tensor, chunk: slice = _ALL) -> Tensor:
        """Return -d loss / d log p, float32 [C]. Likelihood with these weights has the same
        gradient. chunk: which of the R tokens; must be all if `joins_tokens`.
        """
        return self.weights_R[chunk]

    def statistics(self, log_probs_R: Tensor) -> tuple[Tensor, ...]:
        """Return sums over the R tokens for the step's metrics, float32 [] each."""
        return ()


@record
class ObjectiveLosses:
    """The losses weight * (-surrogate + beta * divergence from the reference); the methods are
    those of `WeightedLikelihood`.

    The micro-batch brings advantages; with beta > 0 the reference's log-probabilities; and, after
    the batch's first update, the old ones. Without old ones the current ones, detached, take their
    place.
    """

    objective: Objective
    batch: MicroBatch

    @property
    def joins_tokens(self) -> bool:
        return isinstance(self.objective.surrogate, SequenceClip | SquaredLogRatio)

    def __call__(self, log_probs_C: Tensor, chunk: slice = _ALL) -> Tensor:
        losses_C = -self._surrogate(log_probs_C, chunk)
        if self.objective.beta:
            divergence_C = self._divergence(log_probs_C, chunk)
            losses_C = losses_C + self.objective.beta * divergence_C
        return self.batch.weights_R[chunk] * losses_C

    def weights(self, log_probs_C: Tensor, chunk: slice = _ALL) -> Tensor:
        _, gradient_C = vjp(lambda leaf_C: self(leaf_C, chunk).sum(), log_probs_C)
        return -gradient_C

    def statistics(self, log_probs_R: Tensor) -> tuple[Tensor, ...]:
        """Return the number of tokens whose gradient a clip took away, and the sum of divergences
        from the reference; 0 if the objective has no clip or no reference.
        """
        num_clipped = divergence = log_probs_R.new_zeros(())
        if self.objective.clips:
            num_clipped = self._clipped(log_probs_R).sum()
        if self.objective.needs_reference:
            divergence = self._divergence(log_probs_R, _ALL).sum()
        return num_clipped, divergence

    def _surrogate(self, log_probs_C: Tensor, chunk: slice) -> Tensor:
        """Return the values to be maximised, float32 [C]."""
        batch = self.batch
        assert batch.advantages_R is not None, (
            "a batch of this objective carries advantages"
        )
        advantages_C = batch.advantages_R[chunk]
        old_C = log_probs_C.detach()
        if batch.old_log_probs_R is not None:
            old_C = batch.old_log_probs_R[chunk]
        match self.objective.surrogate:
            case Likelihood():
                return advantages_C * log_probs_C
            case Distillation(likelihood=weight):
                # Its divergence from the teacher is no function of log-probs.
                return weight * (advantages_C * log_probs_C)
            case TokenClip(low=low, high=high, dual=dual):
                ratio_C = (log_probs_C - old_C).exp()
                return _clip(ratio_C, advantages_C, low=low, high=high, dual=dual)
            case SequenceClip(low=low, high=high):
                means_C, counts_C = _mean_of_response(log_probs_C - old_C, batch)
                # Each of the response's n tokens has 1 / n of it.
                return _clip(means_C.exp(), advantages_C, low=low, high=high) / counts_C
            case SquaredLogRatio(tau=tau):
                means_C, counts_C = _mean_of_response(log_probs_C - old_C, batch)
                # (n mean)^2, divided among the n tokens.
                penalty_C = 0.5 * tau * counts_C * means_C.square()
                return advantages_C * log_probs_C - penalty_C

    def _divergence(self, log_probs_C: Tensor, chunk: slice) -> Tensor:
        reference_R = self.batch.reference_log_probs_R
        assert reference_R is not None, (
            "with a divergence a batch carries the reference's log-probs"
        )
        return kl_estimate(self.objective.kl, log_probs_C, reference_R[chunk])

    def _clipped(self, log_probs_R: Tensor) -> Tensor:
        """Return 1 for each token whose gradient a clip took away, else 0; float32 [R]."""
        _, gradient_R = vjp(
            lambda leaf_R: self._surrogate(leaf_R, _ALL).sum(), log_probs_R
        )
        assert self.batch.advantages_R is not None
        return ((gradient_R == 0) & (self.batch.advantages_R != 0)).float()


TokenLosses = WeightedLikelihood | ObjectiveLosses


def _clip(
    ratio: Tensor,
    advantages: Tensor,
    *,
    low: float,
    high: float,
    dual: float | None = None,
) -> Tensor:
    """Return min(r A, clip(r, 1 - low, 1 + high) A) with r = p / old, for A < 0 at least dual A."""
    clipped_ratio = ratio.clamp(1 - low, 1 + high)
    value = torch.minimum(ratio * advantages, clipped_ratio * advantages)
    if dual is None:
        return value
    return torch.where(advantages < 0, torch.maximum(value, dual * advantages), value)


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
    slope = bounded.expm1()  # of k3 at `bounded`
    k3 = slope - bounded
    return k3 + slope * (d - bounded)  # d - bounded is 0 up to _MAX_LOG_RATIO


def _mean_of_response(values_R: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return for every token the mean over its response, and the number of tokens of that response.
    S: the responses.
    """
    lengths = batch.response_lengths
    indices_R = batch.response_indices_R
    if indices_R is not None:
        # The other tokens are on the other ranks of the context-parallel group.
        ends_S = torch.tensor(lengths, device=indices_R.device).cumsum(0)
        numbers_R = torch.searchsorted(ends_S, indices_R, right=True)
        counts_S = values_R.new_tensor(lengths)
        sums_here_S = torch.zeros_like(counts_S).index_add(0, numbers_R, values_R)
        means_S = sum_over_context(sums_here_S) / counts_S
        return means_S[numbers_R], counts_S[numbers_R]
    # An empty vector at the front, because torch.cat refuses an empty list.
    means = [values_R[:0]]
    counts = [values_R[:0]]
    for response in values_R.split(lengths):
        means.append(response.mean().expand_as(response))
        counts.append(response.new_full(response.shape, len(response)))
    return torch.cat(means), torch.cat(counts)


def token_losses(objective: Objective, batch: MicroBatch) -> TokenLosses:
    """Return the cheapest form of the objective's losses. For plain likelihood the batch's weights
    must contain the advantages.
    """
    if objective.is_weighted_likelihood:
        return WeightedLikelihood(batch.weights_R)
    return ObjectiveLosses(objective=objective, batch=batch)
