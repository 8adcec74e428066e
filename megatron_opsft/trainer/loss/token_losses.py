"""Losses of a micro-batch's R response tokens by their log-probabilities, in two forms: likelihood
with given weights, and any objective. Suffix C: those tokens of the R that a slice names.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.autograd.functional import vjp

from megatron_opsft.methods.objective import (
    Distillation,
    Likelihood,
    Objective,
    SequenceClip,
    SquaredLogRatio,
    TokenClip,
)
from megatron_opsft.records import MicroBatch
from megatron_opsft.runtime.distributed import sum_over_context
from megatron_opsft.trainer.loss import surrogates

_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class WeightedLikelihood:
    """weight * -log p."""

    weights_R: Tensor
    joins_tokens: ClassVar[bool] = (
        False  # whether a token's loss depends on its whole response
    )

    def __call__(self, log_probs_C: Tensor, part: slice = _ALL) -> Tensor:
        """float32 [C], differentiable. part: which of the R tokens; all if `joins_tokens`."""
        return -log_probs_C * self.weights_R[part]

    def weights(self, log_probs_C: Tensor, part: slice = _ALL) -> Tensor:
        """-d loss / d log p, float32 [C]: likelihood with these weights has the same gradient."""
        return self.weights_R[part]

    def statistics(self, log_probs_R: Tensor) -> tuple[Tensor, ...]:
        """float32 [] each: sums over the R tokens for the step's metrics."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveLosses:
    """weight * (-surrogate + beta * divergence from the reference), with the same functions.

    The batch carries advantages, with beta > 0 the reference's log-probabilities, and after the
    batch's first update the old ones; where there are none the current ones, detached, are old.
    """

    objective: Objective
    batch: MicroBatch

    @property
    def joins_tokens(self) -> bool:
        return isinstance(self.objective.surrogate, SequenceClip | SquaredLogRatio)

    def __call__(self, log_probs_C: Tensor, part: slice = _ALL) -> Tensor:
        losses_C = -self._surrogate(log_probs_C, part)
        if self.objective.beta:
            losses_C = losses_C + self.objective.beta * self._divergence(
                log_probs_C, part
            )
        return self.batch.weights_R[part] * losses_C

    def weights(self, log_probs_C: Tensor, part: slice = _ALL) -> Tensor:
        _, gradient_C = vjp(lambda leaf_C: self(leaf_C, part).sum(), log_probs_C)
        return -gradient_C

    def statistics(self, log_probs_R: Tensor) -> tuple[Tensor, ...]:
        """Tokens without gradient because of a clip, and divergences from the reference."""
        none = log_probs_R.new_zeros(())
        return (
            self._clipped(log_probs_R).sum() if self.objective.clips else none,
            self._divergence(log_probs_R, _ALL).sum()
            if self.objective.needs_reference
            else none,
        )

    def _surrogate(self, log_probs_C: Tensor, part: slice) -> Tensor:
        """float32 [C], to be maximised."""
        batch = self.batch
        assert batch.advantages_R is not None, (
            "a batch of this objective carries advantages"
        )
        advantages_C = batch.advantages_R[part]
        given_R = batch.old_log_probs_R
        old_C = log_probs_C.detach() if given_R is None else given_R[part]
        lengths, parted = batch.response_lengths, _response_part(batch)
        match self.objective.surrogate:
            case Likelihood():
                return advantages_C * log_probs_C
            case Distillation(
                likelihood=weight
            ):  # the rest is not a function of log-probs
                return weight * (advantages_C * log_probs_C)
            case TokenClip(low=low, high=high, dual=dual):
                return surrogates.token_clip(
                    log_probs_C, old_C, advantages_C, low=low, high=high, dual=dual
                )
            case SequenceClip(low=low, high=high):
                return surrogates.sequence_clip(
                    log_probs_C,
                    old_C,
                    advantages_C,
                    lengths,
                    low=low,
                    high=high,
                    part=parted,
                )
            case SquaredLogRatio(tau=tau):
                return surrogates.squared_log_ratio(
                    log_probs_C, old_C, advantages_C, lengths, tau=tau, part=parted
                )

    def _divergence(self, log_probs_C: Tensor, part: slice) -> Tensor:
        reference_R = self.batch.reference_log_probs_R
        assert reference_R is not None, (
            "with a divergence a batch carries the reference's log-probs"
        )
        return surrogates.kl_estimate(self.objective.kl, log_probs_C, reference_R[part])

    def _clipped(self, log_probs_R: Tensor) -> Tensor:
        """Whether a clip took a token's gradient away, float32 [R]."""
        _, gradient_R = vjp(
            lambda leaf_R: self._surrogate(leaf_R, _ALL).sum(), log_probs_R
        )
        assert self.batch.advantages_R is not None
        return ((gradient_R == 0) & (self.batch.advantages_R != 0)).float()


TokenLosses = WeightedLikelihood | ObjectiveLosses


def _response_part(batch: MicroBatch) -> surrogates.ResponsePart | None:
    """What a rank of a context-parallel group has of each response; None: all of it."""
    if batch.response_indices_R is None:
        return None
    ends = torch.tensor(
        batch.response_lengths, device=batch.response_indices_R.device
    ).cumsum(0)
    numbers = torch.searchsorted(ends, batch.response_indices_R, right=True)
    return surrogates.ResponsePart(numbers=numbers, total=sum_over_context)


def token_losses(objective: Objective, batch: MicroBatch) -> TokenLosses:
    """The form that costs least. Plain likelihood counts on advantages being in the weights."""
    if objective.is_weighted_likelihood:
        return WeightedLikelihood(batch.weights_R)
    return ObjectiveLosses(objective=objective, batch=batch)
