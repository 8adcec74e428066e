"""The output layer as the losses see it, a tensor-parallel rank's rows of its weight; a teacher's
beside it; and their GEMMs, with float32 results whatever the dtype of the factors.

A GEMM of bfloat16 matrices that is rounded to bfloat16 loses what a softmax needs. CUDA's can
return their float32 accumulators; a CPU's cannot, so there the factors are converted, a block of
the second one at a time, so that no second copy of an output weight appears.
"""

from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_opsft.trainer.loss.loss_memory import BLOCK_ROWS


def times_transposed(left_CH: Tensor, right_VH: Tensor) -> Tensor:
    """left @ right.T, float32 [C, V]; both factors in one dtype."""
    if left_CH.dtype == torch.float32:
        return left_CH @ right_VH.T
    if left_CH.is_cuda:
        return torch.mm(left_CH, right_VH.T, out_dtype=torch.float32)
    out_CV = left_CH.new_empty(len(left_CH), len(right_VH), dtype=torch.float32)
    left_CH = left_CH.float()
    for first in range(0, len(right_VH), BLOCK_ROWS):
        part = slice(first, first + BLOCK_ROWS)
        out_CV[:, part] = left_CH @ right_VH[part].float().T
    return out_CV


def add_product_(out_CH: Tensor, left_CV: Tensor, right_VH: Tensor) -> None:
    """out += left @ right; out float32 [C, H]. On a CPU `left` may be float32 and `right` not."""
    if left_CV.is_cuda and left_CV.dtype != torch.float32:
        torch.addmm(out_CH, left_CV, right_VH, out_dtype=torch.float32, out=out_CH)
        return
    for first in range(0, len(right_VH), BLOCK_ROWS):
        part = slice(first, first + BLOCK_ROWS)
        out_CH.addmm_(left_CV[:, part].float(), right_VH[part].float())


def add_outer_(out_VH: Tensor, left_CV: Tensor, right_CH: Tensor) -> None:
    """out += left.T @ right; out float32 [V, H]. On a CPU `left` may be float32 and `right` not."""
    if left_CV.is_cuda and left_CV.dtype != torch.float32:
        torch.addmm(out_VH, left_CV.T, right_CH, out_dtype=torch.float32, out=out_VH)
    else:
        out_VH.addmm_(left_CV.T.float(), right_CH.float())


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputHead:
    """weight_VH: this rank's V rows, the same number on every rank of `group`; rows at or beyond
    `vocab_size` of the whole vocabulary are padding and take part in nothing. temperature: what
    logits are divided by.
    """

    weight_VH: Tensor
    vocab_size: int
    group: ProcessGroup
    temperature: float = 1.0

    @property
    def first_row(self) -> int:
        """Index in the whole vocabulary of this rank's first row."""
        return self.group.rank() * len(self.weight_VH)

    @property
    def num_rows(self) -> int:
        """Rows of this rank that are not padding; may be 0."""
        return max(0, min(len(self.weight_VH), self.vocab_size - self.first_row))

    def logits(self, hidden_CH: Tensor) -> Tensor:
        """Float32 logits [C, num_rows] of this rank's rows."""
        logits_CV = times_transposed(hidden_CH, self.weight_VH[: self.num_rows])
        return (
            logits_CV if self.temperature == 1.0 else logits_CV.div_(self.temperature)
        )


def whole_hidden(
    hidden_TH: Tensor, group: ProcessGroup, *, sequence_parallel: bool
) -> Tensor:
    """The hidden states of all tokens, [T, H], on every tensor-parallel rank.

    hidden_TH: of all tokens, or under sequence parallelism of this rank's part of them. Each rank
    then computes the gradient that its rows of the head cause; the backward pass adds them up.
    """
    if sequence_parallel:
        return gather_from_sequence_parallel_region(
            hidden_TH, tensor_parallel_output_grad=True, group=group
        )
    return copy_to_tensor_model_parallel_region(hidden_TH, group=group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """hidden_RH: where the teacher predicts the R response tokens; head: its output layer, of the
    same group and temperature as the student's; weights_R: float32, of each token's divergence;
    forward: KL(teacher || student) instead of KL(student || teacher).
    """

    hidden_RH: Tensor
    head: OutputHead
    weights_R: Tensor
    forward: bool = False
