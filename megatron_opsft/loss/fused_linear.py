"""Token losses straight from hidden states: the output layer's product and the softmax in chunks.

A chunk is some tokens by some rows of this tensor-parallel rank's output weight. No more than one
chunk of logits exists at a time, so memory does not grow with tokens x vocabulary. Softmax
statistics are combined over chunks and over the tensor-parallel group; padding rows of the weight
are never touched. Logits are float32 whatever the model's dtype.

The gradients are computed in the forward pass, while a chunk's logits are there: with the whole
shard in one block of rows that is three products, as many as without chunks; with several blocks
the logits are computed twice. A token's weight in them is minus the derivative of its loss by its
label's log-probability, which is known by then. The gradient of the output weight goes straight
into Megatron's float32 `main_grad` where there is one, as its fused linear layers do it.

Suffixes: T tokens of a micro-batch, R response tokens among them, C those of a chunk, V rows of the
weight, H hidden size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_opsft.loss.logit_chunks import operations
from megatron_opsft.loss.loss_memory import DEFAULT_CHUNKS, Chunks
from megatron_opsft.loss.output_head import OutputHead
from megatron_opsft.loss.products import add_outer_, add_product_, times_transposed
from megatron_opsft.loss.row_statistics import RowStatistics
from megatron_opsft.loss.token_losses import TokenLosses, WeightedLikelihood
from megatron_opsft.runtime.distributed import max_over, sum_over


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStatistics:
    """float32 [R], equal on every rank of the tensor-parallel group, without gradient.

    entropy_R: of the whole next-token distribution, in nats; None where it was not asked for.
    """

    log_probs_R: Tensor
    entropy_R: Tensor | None


def fused_linear_loss(
    hidden_TH: Tensor,
    head: OutputHead,
    positions_R: Tensor,
    labels_R: Tensor,
    losses: TokenLosses,
    *,
    entropy: bool = False,
    chunks: Chunks = DEFAULT_CHUNKS,
) -> tuple[Tensor, TokenStatistics]:
    """Sum of the losses by log p(labels_r | hidden[positions_r]), float32 [], and what made them.

    positions_R: int64, each at most once; labels_R: int64 in the whole vocabulary; losses: those
    that join tokens cost one more pass over the logits. Called by all ranks of the tensor-parallel
    group with the same arguments, but for the weight; R may be 0. The gradient of `hidden_TH` is
    what this rank's rows cause (`output_head.whole_hidden` adds the ranks' up). Where the weight
    has a `main_grad`, the loss must enter the backward pass with factor 1, once.
    """
    weights_R = None
    if losses.joins_tokens and torch.is_grad_enabled():
        seen = token_statistics(hidden_TH, head, positions_R, labels_R, chunks=chunks)
        weights_R = losses.weights(seen.log_probs_R)
    loss, log_probs_R, entropy_R = _FusedLinearLoss.apply(
        hidden_TH,
        head.weight_VH,
        head,
        positions_R,
        labels_R,
        losses,
        weights_R,
        entropy,
        chunks,
        torch.is_grad_enabled(),
    )
    return loss, TokenStatistics(log_probs_R=log_probs_R, entropy_R=entropy_R)


@torch.no_grad()
def token_statistics(
    hidden_TH: Tensor,
    head: OutputHead,
    positions_R: Tensor,
    labels_R: Tensor,
    *,
    entropy: bool = False,
    chunks: Chunks = DEFAULT_CHUNKS,
) -> TokenStatistics:
    """Log-probabilities of the labels, and the entropy; arguments as for `fused_linear_loss`."""
    none = WeightedLikelihood(torch.zeros_like(labels_R, dtype=torch.float32))
    return fused_linear_loss(
        hidden_TH, head, positions_R, labels_R, none, entropy=entropy, chunks=chunks
    )[1]


@torch.no_grad()
def kl_divergence(
    hidden_p_TH: Tensor,
    head_p: OutputHead,
    hidden_q_TH: Tensor,
    head_q: OutputHead,
    positions_R: Tensor,
    *,
    chunks: Chunks = DEFAULT_CHUNKS,
) -> Tensor:
    """KL(p || q) over the whole vocabulary at each position, in nats, float32 [R].

    Of two models with one vocabulary, sharded alike; hidden sizes and dtypes may differ. Two
    chunks of logits exist at a time. Called by all ranks of the tensor-parallel group.
    """
    if (head_p.vocab_size, len(head_p.weight_VH)) != (head_q.vocab_size, len(head_q.weight_VH)):
        raise ValueError(
            f"the heads differ: {len(head_p.weight_VH)} and {len(head_q.weight_VH)} rows a rank of "
            f"vocabularies of {head_p.vocab_size} and {head_q.vocab_size}"
        )
    ops = operations(hidden_p_TH.device)
    tokens, size = chunks.sizes(len(head_p.weight_VH))
    kl_R = hidden_p_TH.new_zeros(len(positions_R), dtype=torch.float32)
    for part in _parts(len(positions_R), tokens):
        p_CH, q_CH = hidden_p_TH[positions_R[part]], hidden_q_TH[positions_R[part]]
        no_labels_C = torch.full_like(positions_R[part], -1)
        p, q = _no_rows(p_CH, mean=True), _no_rows(q_CH, mean=False)
        for first, stop in head_p.blocks(size):
            of_p_CV = _logits(p_CH, head_p, first, stop)
            of_q_CV = _logits(q_CH, head_q, first, stop)
            q = _join(q, ops.row_statistics(of_q_CV, no_labels_C))
            p = _join(p, ops.row_statistics(of_p_CV, no_labels_C, of_q_CV.sub_(of_p_CV).neg_()))
            del of_p_CV, of_q_CV  # before the next ones
        p, q = _over_group(p, head_p), _over_group(q, head_q)
        assert p.mean_C is not None
        kl_R[part] = (p.mean_C - p.lse_C + q.lse_C).clamp_min(0.0).float()
    return kl_R


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
        weights_R: Tensor | None,
        entropy: bool,
        chunks: Chunks,
        with_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """weights_R: those of the losses, where they are known already."""
        log_probs_R = torch.zeros_like(labels_R, dtype=torch.float32)
        entropy_R = torch.zeros_like(log_probs_R) if entropy else None
        gradient = _Gradient(hidden_TH, head) if with_gradient else None
        tokens, size = chunks.sizes(len(head.weight_VH))
        for part in _parts(len(labels_R), tokens):
            hidden_CH = hidden_TH[positions_R[part]]
            labels_C = labels_R[part] - head.first_row
            found, logits_CV = _scan(hidden_CH, head, labels_C, size, mean=entropy)
            log_probs_R[part] = (found.target_C - found.lse_C).float()
            if entropy_R is not None and found.mean_C is not None:
                entropy_R[part] = (found.lse_C - found.mean_C).float()
            if gradient is not None:
                if weights_R is None:
                    weights_C = losses.weights(log_probs_R[part], part)
                else:
                    weights_C = weights_R[part]
                gradient.add(
                    hidden_CH, positions_R[part], labels_C, weights_C, found, logits_CV, size
                )
            del logits_CV  # before the next ones
        ctx.gradient, ctx.weight = gradient, weight_VH
        ctx.mark_non_differentiable(log_probs_R, *([] if entropy_R is None else [entropy_R]))
        return losses(log_probs_R).sum(), log_probs_R, entropy_R

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
            grad_weight_VH = (torch.zeros_like if mixed else torch.empty_like)(ctx.weight)
        else:
            gradient.hidden_TH.mul_(grad_loss)
            grad_weight_VH = gradient.weight_VH.mul_(grad_loss).to(ctx.weight.dtype)
        return gradient.hidden_TH, grad_weight_VH, *([None] * 8)


class _Gradient:
    """Gradient of the weighted sum of losses; grows chunk by chunk."""

    def __init__(self, hidden_TH: Tensor, head: OutputHead) -> None:
        main: Tensor | None = getattr(head.weight_VH, "main_grad", None)
        self.into_main = main is not None
        self.hidden_TH = torch.zeros_like(hidden_TH)
        self.weight_VH = (
            torch.zeros_like(head.weight_VH, dtype=torch.float32) if main is None else main
        )
        self._head = head
        self._ops = operations(hidden_TH.device)

    def add(
        self,
        hidden_CH: Tensor,
        positions_C: Tensor,
        labels_C: Tensor,
        weights_C: Tensor,
        found: RowStatistics,
        logits_CV: Tensor | None,
        size: int,
    ) -> None:
        """logits_CV: of the whole shard, overwritten; None: they are computed once more."""
        # A CPU's products convert to float32 anyway.
        dtype = hidden_CH.dtype if hidden_CH.is_cuda else torch.float32
        total_CH = torch.zeros_like(hidden_CH, dtype=torch.float32)
        if self._head.temperature != 1.0:
            weights_C = weights_C / self._head.temperature
        for first, stop in self._head.blocks(size):
            rows_VH = self._head.weight_VH[first:stop]
            if logits_CV is None:
                logits_CV = _logits(hidden_CH, self._head, first, stop)
            grad_CV = self._ops.loss_gradient_(
                logits_CV, labels_C - first, found.lse_C.float(), weights_C, dtype
            )
            add_product_(total_CH, grad_CV, rows_VH)
            add_outer_(self.weight_VH[first:stop], grad_CV, hidden_CH)
            del grad_CV
            logits_CV = None  # before the next ones
        self.hidden_TH[positions_C] = total_CH.to(self.hidden_TH.dtype)


def _parts(length: int, size: int) -> Iterator[slice]:
    for first in range(0, length, size):
        yield slice(first, min(first + size, length))


def _logits(hidden_CH: Tensor, head: OutputHead, first: int, stop: int) -> Tensor:
    """Float32 logits of some of this rank's rows."""
    logits_CV = times_transposed(hidden_CH, head.weight_VH[first:stop])
    return logits_CV if head.temperature == 1.0 else logits_CV.div_(head.temperature)


def _scan(
    hidden_CH: Tensor, head: OutputHead, labels_C: Tensor, size: int, *, mean: bool
) -> tuple[RowStatistics, Tensor | None]:
    """Statistics over the whole vocabulary, and the logits if the shard is one block."""
    ops = operations(hidden_CH.device)
    found, logits_CV = _no_rows(hidden_CH, mean=mean), None
    for first, stop in head.blocks(size):
        del logits_CV  # before the next ones
        logits_CV = _logits(hidden_CH, head, first, stop)
        found = _join(
            found, ops.row_statistics(logits_CV, labels_C - first, logits_CV if mean else None)
        )
    return _over_group(found, head), logits_CV if size >= head.num_rows else None


def _no_rows(hidden_CH: Tensor, *, mean: bool) -> RowStatistics:
    # float64: many blocks add up.
    zeros_C = hidden_CH.new_zeros(len(hidden_CH), dtype=torch.float64)
    return RowStatistics(
        lse_C=torch.full_like(zeros_C, -torch.inf),
        target_C=zeros_C,
        mean_C=zeros_C if mean else None,
    )


def _join(a: RowStatistics, b: RowStatistics) -> RowStatistics:
    """Statistics over the columns of both; b has some."""
    lse_C = torch.logaddexp(a.lse_C, b.lse_C)
    mean_C = None
    if a.mean_C is not None and b.mean_C is not None:
        mean_C = a.mean_C * (a.lse_C - lse_C).exp() + b.mean_C * (b.lse_C - lse_C).exp()
    return RowStatistics(lse_C=lse_C, target_C=a.target_C + b.target_C, mean_C=mean_C)


def _over_group(own: RowStatistics, head: OutputHead) -> RowStatistics:
    """Statistics over all ranks' columns, on every rank."""
    if head.group.size() == 1:
        return own
    highest_C = max_over(own.lse_C.clone(), head.group)
    share_C = (own.lse_C - highest_C).exp()
    mean_C = torch.zeros_like(share_C) if own.mean_C is None else own.mean_C
    sums = sum_over(torch.stack([share_C, own.target_C, share_C * mean_C]), head.group)
    return RowStatistics(
        lse_C=highest_C + sums[0].log(),
        target_C=sums[1],
        mean_C=None if own.mean_C is None else sums[2] / sums[0],
    )
