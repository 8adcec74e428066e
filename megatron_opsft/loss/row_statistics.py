"""What the losses keep of the rows of a chunk of logits, joined over chunks and over ranks."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_opsft.runtime.distributed import max_over, sum_over


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStatistics:
    """For each row, float32 [C]: log-sum-exp, the label's logit (0 if it lies elsewhere), and the
    mean of the logits under the row's softmax; mean_C: None where it was not asked for.
    """

    lse_C: Tensor
    target_C: Tensor
    mean_C: Tensor | None


def no_columns(hidden_CH: Tensor, *, mean: bool) -> RowStatistics:
    """Statistics over none, to join others to."""
    # float64: many blocks add up.
    zeros_C = hidden_CH.new_zeros(len(hidden_CH), dtype=torch.float64)
    return RowStatistics(
        lse_C=torch.full_like(zeros_C, -torch.inf),
        target_C=zeros_C,
        mean_C=zeros_C if mean else None,
    )


def join_columns(a: RowStatistics, b: RowStatistics) -> RowStatistics:
    """Statistics over the columns of both; b has some."""
    lse_C = torch.logaddexp(a.lse_C, b.lse_C)
    mean_C = None
    if a.mean_C is not None and b.mean_C is not None:
        mean_C = a.mean_C * (a.lse_C - lse_C).exp() + b.mean_C * (b.lse_C - lse_C).exp()
    return RowStatistics(lse_C=lse_C, target_C=a.target_C + b.target_C, mean_C=mean_C)


def join_ranks(own: RowStatistics, group: ProcessGroup) -> RowStatistics:
    """Statistics over all ranks' columns, on every rank."""
    if group.size() == 1:
        return own
    highest_C = max_over(own.lse_C.clone(), group)
    share_C = (own.lse_C - highest_C).exp()
    mean_C = torch.zeros_like(share_C) if own.mean_C is None else own.mean_C
    sums = sum_over(torch.stack([share_C, own.target_C, share_C * mean_C]), group)
    return RowStatistics(
        lse_C=highest_C + sums[0].log(),
        target_C=sums[1],
        mean_C=None if own.mean_C is None else sums[2] / sums[0],
    )
