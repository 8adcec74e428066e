"""Fills Megatron's shards from HF tensors, and merges shards into HF tensors, by `shard_parameter`.
No process group is used.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.template import ShardKind, WeightRule
from megatron_opsft.models.weights.rectangles import Rect
from megatron_opsft.models.weights.slicing import shard_parameter, shard_shape

ReadRect = Callable[[Rect], Tensor]
"""Reads the values of a rectangle of an HF tensor, such as `HfTensors.read`."""


@torch.no_grad()
def fill_shard(
    rule: WeightRule,
    read: ReadRect,
    shard: Tensor,
    *,
    tp_rank: int,
    tp_size: int,
) -> None:
    """Fill `shard` (any dtype or device) in place from HF tensors, and its padding with zeros.

    One rectangle of each HF tensor is read, around all slices that this rank needs, one tensor at a
    time. The slices of a tensor ascend along one axis, see `shard_parameter`.
    """
    _check_shard(rule, shard, tp_size)
    parameter = shard_parameter(rule, tp_rank, tp_size)
    for name in rule.hf_shapes:
        copies = [copy for copy in parameter.copies if copy.source.tensor == name]
        if not copies:  # the rank's rows of the vocabulary are all padding
            continue
        first, last = copies[0].source, copies[-1].source
        around = first._replace(row1=last.row1, col1=last.col1)
        values = read(around)
        for copy in copies:
            source = copy.source.relative_to(around)
            copy.target.view(shard).copy_(source.view(values))
    shard[parameter.padding_row :].zero_()


@torch.no_grad()
def merge_shards(rule: WeightRule, shards: Sequence[Tensor]) -> dict[str, Tensor]:
    """Make the HF tensors of a rule from the shards of all TP ranks in order.

    The tensors are new; dtype and device are those of the first shard. If a parameter is not cut
    (COPY), rank 0's shard is taken.
    """
    tp_size = len(shards)
    if rule.kind is ShardKind.COPY:
        shards = shards[:1]
    merged = {}
    for name, shape in rule.hf_shapes.items():
        merged[name] = shards[0].new_empty(shape)
    for tp_rank, shard in enumerate(shards):
        _check_shard(rule, shard, tp_size)
        for copy in shard_parameter(rule, tp_rank, tp_size).copies:
            copy.source.view(merged[copy.source.tensor]).copy_(copy.target.view(shard))
    return merged


def _check_shard(rule: WeightRule, shard: Tensor, tp_size: int) -> None:
    expected = shard_shape(rule, tp_size)
    if shard.shape != expected:
        raise UserError(
            f"Megatron parameter {rule.mcore_name} has shape {list(shard.shape)} where the weight "
            f"table expects {list(expected)} at tensor-parallel size {tp_size}"
        )
