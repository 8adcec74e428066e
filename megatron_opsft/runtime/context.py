"""What the ranks of a context-parallel group tell each other about one pack's tokens."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor


class _SumOverContext(torch.autograd.Function):
    """Every rank's result depends on every rank's part, so its gradients are summed as well."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _SumOverContext.forward(ctx, gradients[0])


def sum_over_context(part: Tensor) -> Tensor:
    """Elementwise sum over the group's ranks, a tensor of its own; differentiable, and collective
    in the backward pass too.
    """
    total: Tensor = _SumOverContext.apply(part)
    return total


def join_over_context(
    values_R: Tensor, response_indices_R: Tensor | None, num_tokens: int
) -> Tensor:
    """Of all response tokens of a pack, [num_tokens, ...], what the group's ranks have at their
    places; `values_R` itself where there is no group. Bit for bit: all others add zero.
    """
    if response_indices_R is None:
        return values_R
    whole = values_R.new_zeros(num_tokens, *values_R.shape[1:])
    whole[response_indices_R] = values_R
    return sum_over_context(whole)
