"""Token losses straight from hidden states: the output layer's GEMM and the softmax in chunks.

A chunk is some tokens by the rows of this tensor-parallel rank's output weight. At most one chunk
of logits exists at a time, so memory does not grow with tokens x vocabulary. Softmax statistics are
combined over the tensor-parallel group; padding rows of the weight are never touched. Logits are
float32 whatever the model's dtype.

The gradients are computed in the forward pass, while a chunk's logits exist: three GEMMs, as many
as without chunks. A token's weight in them is minus the derivative of its loss by its label's
log-probability, which is known by then. The gradient of the output weight is added directly to
Megatron's float32 `main_grad` if there is one, as Megatron's fused linear layers do.

With a teacher each chunk also has the teacher's logits, for the divergence over the whole
vocabulary: one GEMM more, and half as many tokens in a chunk.

Suffixes: T tokens of a micro-batch, R response tokens among them, C tokens of a chunk, V rows of
the weight, H hidden size.
"""

from types import ModuleType
from typing import Any, NamedTuple

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


class TokenStatistics(NamedTuple):
    """Log-probabilities and other statistics of the response tokens, float32 [R], without gradient;
    equal on every rank of the tensor-parallel group.
    """

    log_probs_R: Tensor
    entropy_R: Tensor | None = None
    """Entropy of the whole next-token distribution, in nats; None unless requested."""
    divergence_R: Tensor | None = None
    """Divergence from the teacher, in nats; None without a teacher."""


def fused_linear_loss(
    hidden_TH: Tensor,
    head: OutputHead,
    positions_R: Tensor,
    labels_R: Tensor,
    losses: TokenLosses,
    *,
    teacher: Teacher | None = None,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, TokenStatistics]:
    """Return the sum of the losses of log p(labels_r | hidden[positions_r]), float32 [], and the
    statistics of the tokens. With a teacher the sum includes its weights times the divergences.

    positions_R: int64, each at most once. labels_R: int64, indices into the whole vocabulary.
    losses: if they join tokens, the logits are computed once more. chunk_tokens: tokens of a chunk,
    by default `loss_memory.tokens_per_chunk`.

    Called by all ranks of the tensor-parallel group with the same arguments except for the weight;
    R may be 0. The gradient of `hidden_TH` is what this rank's rows cause
    (`output_head.whole_hidden` sums it over the ranks). If the weight has a `main_grad`, the loss
    must enter the backward pass with factor 1, once.
    """
    gradient = None
    if torch.is_grad_enabled():
        separable = losses
        if losses.joins_tokens:
            # A first pass gives all log-probs, and these the weights of a likelihood with the same
            # gradient, which a chunk can compute without the other tokens.
            first_pass = token_statistics(
                hidden_TH, head, positions_R, labels_R, chunk_tokens=chunk_tokens
            )
            separable = WeightedLikelihood(losses.weights(first_pass.log_probs_R))
        gradient = _Gradient(hidden_TH, head, separable)
    statistics = token_statistics(
        hidden_TH,
        head,
        positions_R,
        labels_R,
        chunk_tokens=chunk_tokens,
        teacher=teacher,
        gradient=gradient,
    )
    with torch.no_grad():
        loss = losses(statistics.log_probs_R).sum()
        if teacher is not None and statistics.divergence_R is not None:
            loss = loss + (teacher.weights_R * statistics.divergence_R).sum()
    if gradient is not None:
        loss = _WithGradient.apply(loss, hidden_TH, head.weight_VH, gradient)
    return loss, statistics


@torch.no_grad()
def token_statistics(
    hidden_TH: Tensor,
    head: OutputHead,
    positions_R: Tensor,
    labels_R: Tensor,
    *,
    entropy: bool = False,
    chunk_tokens: int | None = None,
    teacher: Teacher | None = None,
    gradient: "_Gradient | None" = None,
) -> TokenStatistics:
    """Return the statistics alone; parameters as for `fused_linear_loss`.

    entropy: compute it too. gradient: the gradients of the chunks are added to it.
    """
    if chunk_tokens is None:
        chunk_tokens = tokens_per_chunk(
            len(head.weight_VH),
            on_cuda=hidden_TH.is_cuda,
            with_teacher=teacher is not None,
        )
    log_probs_R = torch.zeros_like(labels_R, dtype=torch.float32)
    entropy_R = torch.zeros_like(log_probs_R) if entropy else None
    divergence_R = torch.zeros_like(log_probs_R) if teacher is not None else None
    row_statistics = operations(hidden_TH.device).row_statistics
    for first in range(0, len(labels_R), chunk_tokens):
        chunk = slice(first, first + chunk_tokens)
        hidden_CH = hidden_TH[positions_R[chunk]]
        labels_C = labels_R[chunk] - head.first_row
        logits_CV = head.logits(hidden_CH)
        of_rank = row_statistics(logits_CV, labels_C, mean=entropy)
        wide_lse_C, target_C, mean_C = _combine_ranks(of_rank, head)  # float64
        log_probs_R[chunk] = (target_C - wide_lse_C).float()
        if entropy_R is not None:
            entropy_R[chunk] = (wide_lse_C - mean_C).float()
        lse_C = wide_lse_C.float()
        teacher_chunk = None
        if teacher is not None and divergence_R is not None:
            teacher_chunk = _compare(teacher, chunk, logits_CV, lse_C)
            divergence_R[chunk] = teacher_chunk.divergence_C
        if gradient is not None:
            weights_C = gradient.losses.weights(log_probs_R[chunk], chunk)
            gradient.add(
                hidden_CH,
                positions_R[chunk],
                logits_CV,
                labels_C,
                lse_C,
                weights_C,
                teacher_chunk,
            )
        del logits_CV, teacher_chunk  # before the next chunk's are made
    return TokenStatistics(log_probs_R, entropy_R, divergence_R)


class _WithGradient(torch.autograd.Function):
    """A loss whose gradient is known already."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        gradient: "_Gradient",
    ) -> Tensor:
        ctx.gradient = gradient
        ctx.weight = weight_VH
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> Any:
        gradient: _Gradient = ctx.gradient
        if gradient.weight_VH is None:
            return None, gradient.hidden_TH.mul_(grad_loss), None, None
        if gradient.into_main:
            # The weight's gradient is in `main_grad` already, where no factor reaches it any more.
            # A factor that is not finite is the trainer's business: it drops the whole step.
            torch._assert_async((grad_loss == 1) | ~grad_loss.isfinite())
            ctx.weight.grad_added_to_main_grad = True
            # Data parallelism waits for a gradient, whose values count only if `zero_out_wgrad`
            # says that a tied embedding's gradient is mixed into it.
            if getattr(ctx.weight, "zero_out_wgrad", False):
                grad_weight_VH = torch.zeros_like(ctx.weight)
            else:
                grad_weight_VH = torch.empty_like(ctx.weight)
        else:
            gradient.hidden_TH.mul_(grad_loss)
            grad_weight_VH = gradient.weight_VH.mul_(grad_loss).to(ctx.weight.dtype)
        return None, gradient.hidden_TH, grad_weight_VH, None


class _Gradient:
    """Gradient of the sum of losses, to which chunk after chunk is added.

    losses: they join no tokens, so each chunk's gradient can be computed alone.
    """

    def __init__(
        self, hidden_TH: Tensor, head: OutputHead, losses: TokenLosses
    ) -> None:
        main_grad: Tensor | None = getattr(head.weight_VH, "main_grad", None)
        self.into_main = main_grad is not None
        self.hidden_TH = torch.zeros_like(hidden_TH)
        if main_grad is None and head.weight_VH.requires_grad:
            main_grad = torch.zeros_like(head.weight_VH, dtype=torch.float32)
        self.weight_VH = main_grad  # None for a frozen weight
        self.losses = losses
        self._head = head

    def add(
        self,
        hidden_CH: Tensor,
        positions_C: Tensor,
        logits_CV: Tensor,
        labels_C: Tensor,
        lse_C: Tensor,
        weights_C: Tensor,
        teacher_chunk: "_TeacherChunk | None",
    ) -> None:
        """Add a chunk's gradients.

        logits_CV: this rank's columns; they are overwritten, as are the teacher's. lse_C: over the
        whole vocabulary, float32. weights_C: minus the derivative of each token's loss by its
        log-prob.
        """
        # A CPU's GEMMs convert to float32 anyway.
        dtype = self.hidden_TH.dtype if self.hidden_TH.is_cuda else torch.float32
        weights_C = weights_C / self._head.temperature
        ops = operations(logits_CV.device)
        if teacher_chunk is None:
            grad_CV = ops.loss_gradient_(logits_CV, labels_C, lse_C, weights_C, dtype)
        else:
            grad_CV = ops.distillation_gradient_(
                logits_CV,
                teacher_chunk.logits_CV,
                labels_C,
                lse_C,
                teacher_chunk.lse_C,
                teacher_chunk.divergence_C,
                weights_C,
                teacher_chunk.weights_C / self._head.temperature,
                dtype,
                forward=teacher_chunk.forward,
            )
        total_CH = torch.zeros_like(hidden_CH, dtype=torch.float32)
        num_rows = self._head.num_rows
        add_product_(total_CH, grad_CV, self._head.weight_VH[:num_rows])
        if self.weight_VH is not None:
            add_outer_(self.weight_VH[:num_rows], grad_CV, hidden_CH)
        self.hidden_TH[positions_C] = total_CH.to(self.hidden_TH.dtype)


class _TeacherChunk(NamedTuple):
    """The teacher's side of a chunk; all tensors float32."""

    logits_CV: Tensor
    """The teacher's logits of this rank's rows."""
    lse_C: Tensor
    """The teacher's log-sum-exp over all ranks' rows."""
    divergence_C: Tensor
    """The divergence between student and teacher, over all ranks' rows."""
    weights_C: Tensor
    """The weights of the divergences in the loss."""
    forward: bool
    """See `Teacher`."""


def _compare(
    teacher: Teacher, chunk: slice, logits_CV: Tensor, lse_C: Tensor
) -> _TeacherChunk:
    """Return the teacher's side of a chunk of the R tokens; logits_CV, lse_C: the student's."""
    head = teacher.head
    teacher_CV = head.logits(teacher.hidden_RH[chunk])
    no_labels_C = torch.full_like(lse_C, -1, dtype=torch.int64)
    ops = operations(logits_CV.device)
    of_rank = ops.row_statistics(teacher_CV, no_labels_C)
    wide_lse_C, _, _ = _combine_ranks(of_rank, head)
    teacher_lse_C = wide_lse_C.float()
    divergence_C = ops.divergences(
        logits_CV, teacher_CV, lse_C, teacher_lse_C, forward=teacher.forward
    )
    if head.group.size() > 1:
        divergence_C = sum_over(divergence_C, head.group)
    return _TeacherChunk(
        teacher_CV,
        teacher_lse_C,
        divergence_C,
        teacher.weights_R[chunk],
        teacher.forward,
    )


def operations(device: torch.device) -> ModuleType:
    """Return the module with the operations on a chunk of logits; on a CUDA device Triton's."""
    if device.type != "cuda":
        return logit_chunks
    from megatron_opsft.trainer.loss import logit_kernels

    return logit_kernels


def _combine_ranks(
    of_rank: RowStatistics, head: OutputHead
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, on every rank, the float64 statistics over all ranks' columns; the means are
    meaningless if they were not requested.

    of_rank: the statistics of this rank's columns.
    """
    lse_C = of_rank.lse_C.double()
    target_C = of_rank.target_C.double()
    mean_C = torch.zeros_like(lse_C)
    if of_rank.mean_C is not None:
        mean_C = of_rank.mean_C.double()
    if head.group.size() > 1:
        highest_C = max_over(lse_C.clone(), head.group)
        share_C = (lse_C - highest_C).exp()
        stacked = torch.stack([share_C, target_C, share_C * mean_C])
        total_C, target_C, weighted_C = sum_over(stacked, head.group)
        lse_C = highest_C + total_C.log()
        mean_C = weighted_C / total_C
    return lse_C, target_C, mean_C
