"""The output layer as the losses see it: a tensor-parallel rank's rows of its weight, the same of a
teacher, and their GEMMs, which give float32 results whatever the dtype of the factors.

A product of bfloat16 matrices that is rounded to bfloat16 is too coarse for a softmax. CUDA's GEMMs
can return their float32 accumulators; a CPU's cannot, so there the factors are converted, a block
of the second one at a time: no whole float32 copy of an output weight is made.
"""

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_opsft.records import record
from megatron_opsft.trainer.loss.loss_memory import BLOCK_ROWS


def times_transposed(left_CH: Tensor, right_VH: Tensor) -> Tensor:
    """Return left @ right.T, float32 [C, V]; both factors have the same dtype."""
    if left_CH.dtype == torch.float32:
        return left_CH @ right_VH.T
    if left_CH.is_cuda:
        return torch.mm(left_CH, right_VH.T, out_dtype=torch.float32)
    out_CV = left_CH.new_empty(len(left_CH), len(right_VH), dtype=torch.float32)
    left_CH = left_CH.float()
    for first in range(0, len(right_VH), BLOCK_ROWS):
        block = slice(first, first + BLOCK_ROWS)
        out_CV[:, block] = left_CH @ right_VH[block].float().T
    return out_CV


def add_product_(out_CH: Tensor, left_CV: Tensor, right_VH: Tensor) -> None:
    """Add left @ right to `out`, float32 [C, H]. On a CPU `left` may be float32 and `right` not."""
    if left_CV.is_cuda and left_CV.dtype != torch.float32:
        torch.addmm(out_CH, left_CV, right_VH, out_dtype=torch.float32, out=out_CH)
        return
    for first in range(0, len(right_VH), BLOCK_ROWS):
        block = slice(first, first + BLOCK_ROWS)
        out_CH.addmm_(left_CV[:, block].float(), right_VH[block].float())


def add_outer_(out_VH: Tensor, left_CV: Tensor, right_CH: Tensor) -> None:
    """Add left.T @ right to `out`, float32 [V, H]; dtypes as for `add_product_`."""
    if left_CV.is_cuda and left_CV.dtype != torch.float32:
        torch.addmm(out_VH, left_CV.T, right_CH, out_dtype=torch.float32, out=out_VH)
    else:
        out_VH.addmm_(left_CV.T.float(), right_CH.float())


@record
class OutputHead:
    """The output layer on one rank of the tensor-parallel `group`."""

    weight_VH: Tensor
    """This rank's rows of the weight, equally many on every rank."""
    vocab_size: int
    """Size of the whole vocabulary. Rows at or beyond it are padding and never used."""
    group: ProcessGroup
    temperature: float = 1.0

    @property
    def first_row(self) -> int:
        """Index of this rank's first row in the whole vocabulary."""
        return self.group.rank() * len(self.weight_VH)

    @property
    def num_rows(self) -> int:
        """Number of this rank's rows that are not padding; may be 0."""
        return max(0, min(len(self.weight_VH), self.vocab_size - self.first_row))

    def logits(self, hidden_CH: Tensor) -> Tensor:
        """Return this rank's logits, float32 [C, num_rows]."""
        logits_CV = times_transposed(hidden_CH, self.weight_VH[: self.num_rows])
        if self.temperature != 1.0:
            logits_CV.div_(self.temperature)
        return logits_CV


def whole_hidden(
    hidden_TH: Tensor, group: ProcessGroup, *, sequence_parallel: bool
) -> Tensor:
    """Return the hidden states of all tokens, [T, H], on every tensor-parallel rank.

    hidden_TH: of all tokens, or under sequence parallelism of this rank's share of them. Each rank
    later computes the gradient through its own rows of the output layer; the backward pass sums
    these gradients over the ranks.
    """
    if sequence_parallel:
        return gather_from_sequence_parallel_region(
            hidden_TH, tensor_parallel_output_grad=True, group=group
        )
    return copy_to_tensor_model_parallel_region(hidden_TH, group=group)


@record
class Teacher:
    """The teacher of a micro-batch's R response tokens, for the divergence from it."""

    hidden_RH: Tensor
    """The teacher's hidden states at the positions where it predicts the response tokens."""
    head: OutputHead
    """The teacher's output layer, with the group and the temperature of the student's."""
    weights_R: Tensor
    """float32: the weight of each token's divergence in the loss."""
    forward: bool = False
    """True: KL(teacher || student); False: KL(student || teacher)."""
