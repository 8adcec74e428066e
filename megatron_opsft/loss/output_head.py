"""The output layer as the losses see it: a tensor-parallel rank's rows of its weight."""

from dataclasses import dataclass

from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_opsft.loss.gemms import times_transposed


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
        """Rows of this rank that are no padding; may be 0."""
        return max(0, min(len(self.weight_VH), self.vocab_size - self.first_row))

    def logits(self, hidden_CH: Tensor) -> Tensor:
        """Float32 logits [C, num_rows] of this rank's rows."""
        logits_CV = times_transposed(hidden_CH, self.weight_VH[: self.num_rows])
        return logits_CV if self.temperature == 1.0 else logits_CV.div_(self.temperature)


def whole_hidden(hidden_TH: Tensor, group: ProcessGroup, *, sequence_parallel: bool) -> Tensor:
    """The hidden states of all tokens, [T, H], on every tensor-parallel rank.

    hidden_TH: of all tokens, or under sequence parallelism of this rank's part of them. Each rank
    then computes the gradient that its rows of the head cause; the backward pass adds them up.
    """
    if sequence_parallel:
        return gather_from_sequence_parallel_region(
            hidden_TH, tensor_parallel_output_grad=True, group=group
        )
    return copy_to_tensor_model_parallel_region(hidden_TH, group=group)
