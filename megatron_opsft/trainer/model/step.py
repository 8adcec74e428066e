"""One training step on Megatron's forward-backward schedule."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer
from torch import Tensor

from megatron_opsft.errors import NonFiniteError
from megatron_opsft.methods.objective import Distillation
from megatron_opsft.records import MicroBatch, StepResult
from megatron_opsft.runtime.distributed import (
    any_over_world,
    gather_from_all,
    sum_over_world,
)
from megatron_opsft.runtime.phase import current_phase, describe_rank
from megatron_opsft.trainer.loss.cross_entropy import summed_loss
from megatron_opsft.trainer.loss.fused_linear import fused_linear_loss
from megatron_opsft.trainer.loss.output_head import OutputHead, Teacher
from megatron_opsft.trainer.loss.token_losses import token_losses
from megatron_opsft.trainer.model.optimizer import set_learning_rate, update
from megatron_opsft.trainer.model.passes import ModelPasses

NOTHING_DONE = StepResult(
    applied=False, loss=0.0, grad_norm=0.0, lr=0.0, trained_tokens=0, num_microbatches=0
)


def _sum_losses(
    trainer: "Trainer", head: OutputHead, batch: MicroBatch, hidden_TH: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """The weighted, unnormalised sum of one micro-batch's token losses, for the schedule; again,
    with the sums of the objective's statistics.
    """
    objective = trainer.objective
    losses = token_losses(objective, batch)
    num_tokens = torch.tensor(
        batch.num_loss_tokens, dtype=torch.int, device=hidden_TH.device
    )
    if isinstance(objective.surrogate, Distillation):
        loss_sum, found = fused_linear_loss(
            hidden_TH,
            head,
            batch.loss_indices_R,
            batch.labels_R,
            losses,
            teacher=_teacher_of(objective.surrogate, head, batch),
        )
        assert found.divergence_R is not None
        clipped, _ = losses.statistics(found.log_probs_R)
        statistics: tuple[Tensor, ...] = (clipped, found.divergence_R.sum())
    else:
        loss_sum, log_probs_R = summed_loss(
            trainer.cross_entropy,
            hidden_TH,
            head,
            batch.loss_indices_R,
            batch.labels_R,
            losses,
            accumulation_fusion=trainer.config.gradient_accumulation_fusion,
        )
        statistics = losses.statistics(log_probs_R)
    return loss_sum, num_tokens, (loss_sum.detach().clone(), *statistics)


def _teacher_of(
    distillation: Distillation, head: OutputHead, batch: MicroBatch
) -> Teacher:
    """As `ReferenceModel.with_teacher` has left it in the micro-batch."""
    states_RH, weight_VH = batch.teacher_RH, batch.teacher_VH
    assert states_RH is not None and weight_VH is not None, (
        "a distilled batch has a teacher"
    )
    return Teacher(
        hidden_RH=states_RH.to(weight_VH.device),
        head=replace(head, weight_VH=weight_VH),
        weights_R=distillation.beta * batch.weights_R,
        forward=distillation.forward,
    )


@dataclass(eq=False, kw_only=True)
class Trainer(ModelPasses):
    """The model's shards and their optimizer on this rank."""

    optimizer: ChainedOptimizer
    _own_loss_is_finite: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        # Sums over micro-batches and ranks are final here; Megatron's own division by a token
        # count is not wanted, so `num_tokens` is left out.
        self.config.finalize_model_grads_func = (
            lambda model, num_tokens=None, **kwargs: finalize_model_grads(
                model, None, **kwargs
            )
        )

    def accumulate(self, batches: Sequence[MicroBatch], factor: float) -> StepResult:
        """Main gradients of `factor` x the weighted sum of all ranks' token losses; the result of a
        step that is not applied yet, equal on every rank.

        Every rank calls it with equally many micro-batches, at least one.
        """
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self._run(
            partial(_sum_losses, self),
            batches,
            self.objective.temperature,
            forward_only=False,
        )
        for chunk in self.chunks:
            chunk.scale_gradients(factor)
        mine = [0.0] * 4  # tokens, losses and statistics of this rank
        if self.layout.is_loss_rank:
            mine[0] = sum(batch.num_loss_tokens for batch in batches)
            for place, each in enumerate(zip(*losses, strict=True), start=1):
                mine[place] = sum(map(float, each))
        self._own_loss_is_finite = math.isfinite(mine[1])
        tokens, loss, clipped, divergence = sum_over_world(mine)
        return replace(
            NOTHING_DONE,
            loss=factor * loss,
            trained_tokens=int(tokens),
            num_microbatches=len(batches),
            clip_share=clipped / tokens if self.objective.clips else None,
            kl_mean=divergence / tokens if self.objective.keeps_frozen_model else None,
        )

    def step(
        self, batches: Sequence[MicroBatch], factor: float, lr: float
    ) -> StepResult:
        """One update with learning rate `lr`; called by every rank.

        No micro-batch anywhere (nothing accepted): nothing changes and `applied` is False.
        Errors: `NonFiniteError` on every rank, before any weight changes.
        """
        if not batches:
            return replace(NOTHING_DONE, lr=lr)
        found = self.accumulate(batches, factor)
        set_learning_rate(self.optimizer, lr)
        self.optimizer.prepare_grads()
        norm = self.optimizer.get_grad_norm()
        grad_norm = math.nan if any_over_world(norm is None) else float(norm)
        if not (math.isfinite(found.loss) and math.isfinite(grad_norm)):
            raise NonFiniteError(self._describe_non_finite(found.loss, grad_norm))
        update(self.optimizer, norm)
        return replace(found, applied=True, grad_norm=grad_norm, lr=lr)

    def _describe_non_finite(self, loss: float, grad_norm: float) -> str:
        """What is wrong and where it came from; called by every rank."""
        values = f"loss {loss}, gradient norm {grad_norm}"
        message = f"{current_phase()}: {values}: the step was not applied"
        sources = gather_from_all([] if self._own_loss_is_finite else [describe_rank()])
        return f"{message}; not finite at {', '.join(sources)}" if sources else message
