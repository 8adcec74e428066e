"""Input and results of a pass of the model: Megatron's description of a micro-batch, and the losses
from its hidden states.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_opsft.methods.objective import Distillation, Objective
from megatron_opsft.records import MicroBatch
from megatron_opsft.trainer.loss.cross_entropy import summed_loss
from megatron_opsft.trainer.loss.loss_memory import CrossEntropyKind
from megatron_opsft.trainer.loss.output_head import OutputHead, Teacher
from megatron_opsft.trainer.loss.token_losses import token_losses

OfHidden = Callable[[OutputHead, MicroBatch, Tensor], Any]
"""Takes a micro-batch and the hidden states of all its tokens after the last layer, [T, H]; returns
what a pass computes: a loss, scores, or some of the hidden states.
"""


def packed_params(batch: MicroBatch) -> PackedSeqParams:
    """Return Megatron's description of a packed micro-batch.

    Padding at the end of a sequence counts as its tokens: causal attention never lets earlier
    tokens see it, every sequence can be cut for context parallelism, and no attention has to skip
    gaps. TransformerEngine up to 2.17.1 skips them wrongly if the ranks' shares have uneven lengths
    (its issue 3331).
    """
    borders = batch.cu_seqlens if batch.response_indices_R is not None else None
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        # The same tensors tell TransformerEngine that there are no gaps.
        cu_seqlens_q_padded=borders,
        cu_seqlens_kv_padded=borders,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
    )


class BatchSums(NamedTuple):
    """Sums over the response tokens of one micro-batch."""

    loss: Tensor
    clipped: Tensor | float = 0.0
    """Number of tokens whose gradient a clip took away."""
    divergence: Tensor | float = 0.0
    """Divergence from the reference model or the teacher."""


def sum_losses(
    objective: Objective,
    cross_entropy: CrossEntropyKind,
    accumulation_fusion: bool,
    head: OutputHead,
    batch: MicroBatch,
    hidden_TH: Tensor,
) -> tuple[Tensor, Tensor, BatchSums]:
    """Return, for the schedule, the weighted, unnormalised sum of a micro-batch's token losses, its
    number of response tokens, and its sums for the step's metrics.

    accumulation_fusion: see `summed_loss`.
    """
    losses = token_losses(objective, batch)
    num_tokens = torch.tensor(
        batch.num_loss_tokens, dtype=torch.int, device=hidden_TH.device
    )
    teacher = None
    if isinstance(objective.surrogate, Distillation):
        # What `ReferenceModel.with_teacher` put into the micro-batch.
        states_RH, weight_VH = batch.teacher_RH, batch.teacher_VH
        assert states_RH is not None and weight_VH is not None, (
            "a distilled batch has a teacher"
        )
        teacher = Teacher(
            hidden_RH=states_RH.to(weight_VH.device),
            head=replace(head, weight_VH=weight_VH),
            weights_R=objective.surrogate.beta * batch.weights_R,
            forward=objective.surrogate.forward,
        )
    loss_sum, token_values = summed_loss(
        cross_entropy,
        hidden_TH,
        head,
        batch.loss_indices_R,
        batch.labels_R,
        losses,
        teacher=teacher,
        accumulation_fusion=accumulation_fusion,
    )
    sums = BatchSums(
        loss_sum.detach().clone(), *losses.statistics(token_values.log_probs_R)
    )
    if token_values.divergence_R is not None:
        sums = sums._replace(divergence=token_values.divergence_R.sum())
    return loss_sum, num_tokens, sums


def with_log_probs(
    batches: Sequence[MicroBatch], log_probs: Sequence[Tensor], name: str
) -> list[MicroBatch]:
    """Return the micro-batches with the result of `Trainer.score_batches` as their field `name`,
    which is `old_log_probs_R` or `reference_log_probs_R`.

    Without log-probs they are unchanged: only ranks of the last stage have and need them.
    """
    if not log_probs:
        return list(batches)
    pairs = zip(batches, log_probs, strict=True)
    return [replace(batch, **cast(Any, {name: values_R})) for batch, values_R in pairs]
