"""Token losses straight from hidden states: the output layer's GEMM and the softmax in chunks.

A chunk is some tokens by the rows of this tensor-parallel rank's output weight. No more than one
chunk of logits exists at a time, so memory does not grow with tokens x vocabulary. Softmax
statistics are combined over the tensor-parallel group; padding rows of the weight are never
touched. Logits are float32 whatever the model's dtype.

The gradients are computed in the forward pass, while a chunk's logits are there: three GEMMs, as
many as without chunks. A token's weight in them is minus the derivative of its loss by its label's
log-probability, which is known by then. The gradient of the output weight goes straight into
Megatron's float32 `main_grad` where there is one, as its fused linear layers do it.

With a teacher each chunk has its logits too, for the divergence over the whole vocabulary: one GEMM
more, and half as many tokens in a chunk.

Suffixes: T tokens of a micro-batch, R response tokens among them, C those of a chunk, V rows of the
weight, H hidden size.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_opsft.runtime.distributed import max_over, sum_over
from megatron_opsft.trainer.loss import logit_chunks
from megatron_opsft.trainer.loss.logit_chunks import RowStatistics
from megatron_opsft.trainer.loss.loss_memory import tokens_per_chunk
from megatron_opsft.trainer.loss.output_head import (
    OutputHead,
    Teacher,
    add_outer_,
    add_product_,
)
from megatron_opsft.trainer.loss.token_losses import TokenLosses, WeightedLikelihood


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStatistics:
    """float32 [R], equal on every rank of the tensor-parallel group, without gradient.

    entropy_R: of the whole next-token distribution, in nats; divergence_R: from the teacher's; None
    where it was not asked for.
    """

    log_probs_R: Tensor
    entropy_R: Tensor | None
    divergence_R: Tensor | None


def fused_linear_loss(
    hidden_TH: Tensor,
    head: OutputHead,
    positions_R: Tensor,
    labels_R: Tensor,
    losses: TokenLosses,
    *,
    teacher: Teacher | None = None,
    entropy: bool = False,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, TokenStatistics]:
    """Sum of the losses by log p(labels_r | hidden[positions_r]), float32 [], and what made them;
    with a teacher also of its weights times the divergences from it.

    positions_R: int64, each at most once; labels_R: int64 in the whole vocabulary; losses: those
    that join tokens cost one more pass over the logits; chunk_tokens: tokens of a chunk, by default
    as many as `loss_memory.tokens_per_chunk` says. Called by all ranks of the tensor-parallel
    group with the same arguments, but for the weight; R may be 0. The gradient of `hidden_TH` is
    what this rank's rows cause (`output_head.whole_hidden` adds the ranks' up). Where the weight
    has a `main_grad`, the loss must enter the backward pass with factor 1, once.
    """
    by_token = losses
    if losses.joins_tokens and torch.is_grad_enabled():
        seen = token_statistics(
            hidden_TH, head, positions_R, labels_R, chunk_tokens=chunk_tokens
        )
        by_token = WeightedLikelihood(losses.weights(seen.log_probs_R))
    loss, log_probs_R, entropy_R, divergence_R = _FusedLinearLoss.apply(
        hidden_TH,
        head.weight_VH,
        head,
        positions_R,
        labels_R,
        losses,
        by_token,
        teacher,
        entropy,
        chunk_tokens
        or tokens_per_chunk(
            len(head.weight_VH),
            on_cuda=hidden_TH.is_cuda,
            with_teacher=teacher is not None,
        ),
        torch.is_grad_enabled(),
    )
    return loss, TokenStatistics(
        log_probs_R=log_probs_R, entropy_R=entropy_R, divergence_R=divergence_R
    )


@torch.no_grad()
def token_statistics(
    hidden_TH: Tensor,
    head: OutputHead,
    positions_R: Tensor,
    labels_R: Tensor,
    *,
    entropy: bool = False,
    chunk_tokens: int | None = None,
) -> TokenStatistics:
    """Log-probabilities of the labels, and the entropy; arguments as for `fused_linear_loss`."""
    none = WeightedLikelihood(torch.zeros_like(labels_R, dtype=torch.float32))
    return fused_linear_loss(
        hidden_TH,
        head,
        positions_R,
        labels_R,
        none,
        entropy=entropy,
        chunk_tokens=chunk_tokens,
    )[1]


class _FusedLinearLoss(torch.autograd.Function):
    """See `fused_linear_loss`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        head: OutputHead,
        positions_R: Tensor,
        labels_R: Tensor,
        losses: TokenLosses,
        by_token: TokenLosses,
        teacher: Teacher | None,
        entropy: bool,
        chunk_tokens: int,
        with_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """by_token: what has the gradient of the losses, but joins no tokens."""
        log_probs_R = torch.zeros_like(labels_R, dtype=torch.float32)
        entropy_R = torch.zeros_like(log_probs_R) if entropy else None
        divergence_R = torch.zeros_like(log_probs_R) if teacher is not None else None
        gradient = _Gradient(hidden_TH, head) if with_gradient else None
        ops = operations(hidden_TH.device)
        for first in range(0, len(labels_R), chunk_tokens):
            part = slice(first, first + chunk_tokens)
            hidden_CH = hidden_TH[positions_R[part]]
            labels_C = labels_R[part] - head.first_row
            logits_CV = head.logits(hidden_CH)
            found = _over_ranks(
                ops.row_statistics(logits_CV, labels_C, mean=entropy), head
            )
            log_probs_R[part] = (found.target_C - found.lse_C).float()
            if entropy_R is not None and found.mean_C is not None:
                entropy_R[part] = (found.lse_C - found.mean_C).float()
            taught = None
            if teacher is not None and divergence_R is not None:
                taught = _compare(teacher, part, logits_CV, found.lse_C)
                divergence_R[part] = taught.divergence_C
            if gradient is not None:
                weights_C = by_token.weights(log_probs_R[part], part)
                lse_C = found.lse_C.float()
                grad_CV = gradient.of_logits(
                    labels_C, weights_C, lse_C, logits_CV, taught
                )
                gradient.add(hidden_CH, positions_R[part], grad_CV)
                del grad_CV
            del logits_CV, taught  # before the next ones
        ctx.gradient, ctx.weight = gradient, weight_VH
        loss = losses(log_probs_R).sum()
        if teacher is not None and divergence_R is not None:
            loss = loss + (teacher.weights_R * divergence_R).sum()
        asked = [
            found_R for found_R in (entropy_R, divergence_R) if found_R is not None
        ]
        ctx.mark_non_differentiable(log_probs_R, *asked)
        return loss, log_probs_R, entropy_R, divergence_R

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *unused: Any) -> Any:
        gradient: _Gradient = ctx.gradient
        if gradient.into_main:
            # The weight's part is where it belongs already: no factor can reach it any more. One
            # that is not finite is for the trainer, which then drops the whole step.
            torch._assert_async((grad_loss == 1) | ~grad_loss.isfinite())
            ctx.weight.grad_added_to_main_grad = True
            # Data parallelism waits for a gradient, and adds it only where `zero_out_wgrad` says
            # that a tied embedding's is mixed into it.
            mixed = getattr(ctx.weight, "zero_out_wgrad", False)
            grad_weight_VH = (torch.zeros_like if mixed else torch.empty_like)(
                ctx.weight
            )
        else:
            gradient.hidden_TH.mul_(grad_loss)
            grad_weight_VH = gradient.weight_VH.mul_(grad_loss).to(ctx.weight.dtype)
        return gradient.hidden_TH, grad_weight_VH, *([None] * 9)


class _Gradient:
    """Gradient of the weighted sum of losses; grows chunk by chunk."""

    def __init__(self, hidden_TH: Tensor, head: OutputHead) -> None:
        main: Tensor | None = getattr(head.weight_VH, "main_grad", None)
        self.into_main = main is not None
        self.hidden_TH = torch.zeros_like(hidden_TH)
        self.weight_VH = (
            torch.zeros_like(head.weight_VH, dtype=torch.float32)
            if main is None
            else main
        )
        self._head = head
        self._ops = operations(hidden_TH.device)

    def of_logits(
        self,
        labels_C: Tensor,
        weights_C: Tensor,
        lse_C: Tensor,
        logits_CV: Tensor,
        taught: "_Taught | None",
    ) -> Tensor:
        """The gradient of a chunk's logits; lse_C: over the whole vocabulary, float32; logits_CV:
        of this rank's rows, undefined afterwards as the teacher's are.
        """
        # A CPU's GEMMs convert to float32 anyway.
        dtype = self.hidden_TH.dtype if self.hidden_TH.is_cuda else torch.float32
        temperature = self._head.temperature
        if temperature != 1.0:
            weights_C = weights_C / temperature
        if taught is None:
            return self._ops.loss_gradient_(
                logits_CV, labels_C, lse_C, weights_C, dtype
            )
        return self._ops.distillation_gradient_(
            logits_CV,
            taught.logits_CV,
            labels_C,
            lse_C,
            taught.lse_C,
            taught.divergence_C,
            weights_C,
            taught.weights_C / temperature,
            dtype,
            forward=taught.forward,
        )

    def add(self, hidden_CH: Tensor, positions_C: Tensor, grad_CV: Tensor) -> None:
        """grad_CV: as `of_logits` gave it."""
        total_CH = torch.zeros_like(hidden_CH, dtype=torch.float32)
        num_rows = self._head.num_rows
        add_product_(total_CH, grad_CV, self._head.weight_VH[:num_rows])
        add_outer_(self.weight_VH[:num_rows], grad_CV, hidden_CH)
        self.hidden_TH[positions_C] = total_CH.to(self.hidden_TH.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taught:
    """A chunk of the teacher's logits, of this rank's rows, and how far the student is from them;
    float32, lse_C and divergence_C over all ranks' rows.
    """

    logits_CV: Tensor
    lse_C: Tensor
    divergence_C: Tensor
    weights_C: Tensor
    forward: bool


def _compare(
    teacher: Teacher, part: slice, logits_CV: Tensor, lse_C: Tensor
) -> _Taught:
    """logits_CV, lse_C: the student's, of those of the R tokens that `part` names."""
    head, hidden_CH = teacher.head, teacher.hidden_RH[part]
    teacher_CV = head.logits(hidden_CH)
    nowhere_C = torch.full_like(lse_C, -1, dtype=torch.int64)
    ops = operations(logits_CV.device)
    own = ops.row_statistics(teacher_CV, nowhere_C)
    teacher_lse_C = _over_ranks(own, head).lse_C.float()
    divergence_C = ops.divergences(
        logits_CV, teacher_CV, lse_C.float(), teacher_lse_C, forward=teacher.forward
    )
    if head.group.size() > 1:
        divergence_C = sum_over(divergence_C, head.group)
    return _Taught(
        logits_CV=teacher_CV,
        lse_C=teacher_lse_C,
        divergence_C=divergence_C,
        weights_C=teacher.weights_R[part],
        forward=teacher.forward,
    )


def operations(device: torch.device) -> ModuleType:
    """Whose operations on a chunk of logits are used: on a CUDA device those in Triton."""
    if device.type != "cuda":
        return logit_chunks
    from megatron_opsft.trainer.loss import logit_kernels

    return logit_kernels


def _over_ranks(own: RowStatistics, head: OutputHead) -> RowStatistics:
    """Statistics over all ranks' columns in float64, on every rank."""
    group = head.group
    lse_C, target_C = own.lse_C.double(), own.target_C.double()
    mean_C = None if own.mean_C is None else own.mean_C.double()
    if group.size() > 1:
        highest_C = max_over(lse_C.clone(), group)
        share_C = (lse_C - highest_C).exp()
        weighted_C = torch.zeros_like(share_C) if mean_C is None else share_C * mean_C
        sums = sum_over(torch.stack([share_C, target_C, weighted_C]), group)
        lse_C, target_C = highest_C + sums[0].log(), sums[1]
        mean_C = None if mean_C is None else sums[2] / sums[0]
    return RowStatistics(lse_C=lse_C, target_C=target_C, mean_C=mean_C)
