"""Which rectangle of which HF tensor sits where in which tensor-parallel shard; no process group.

`shard_parameter` is the one definition of Megatron's layout. Filling a shard from HF tensors,
scattering it back, and the transfer schedules all follow from it, so the two directions cannot
disagree. TP size 1 gives the whole Megatron parameter, which is what a checkpoint converter works
on.
"""

from collections.abc import Callable, Sequence
from math import lcm

import torch
from torch import Tensor

from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.template import Rule, ShardKind
from megatron_opsft.models.weights.rectangles import Copy, Parameter, Rect

ReadRect = Callable[[Rect], Tensor]
"""The values of a rectangle of an HF tensor, like `HfTensors.read`."""


def padded_vocab_size(
    vocab_size: int, tp_size: int = 1, divisible_by: int = 128
) -> int:
    """Rows of the Megatron embedding: `vocab_size` rounded up to a multiple that TP divides.

    The multiple is lcm(divisible_by, tp_size), not Megatron's product: so the size is the same for
    every power of two up to 128, and a distributed checkpoint loads at another TP without resizing.
    """
    multiple = lcm(divisible_by, tp_size)
    return -(-vocab_size // multiple) * multiple


def shard_shape(rule: Rule, tp_size: int) -> tuple[int, ...]:
    """Shape of one TP rank's shard of a parameter; the same on every rank."""
    shape = list(rule.mcore_shape)
    if rule.kind is not ShardKind.COPY:
        axis = 1 if rule.kind is ShardKind.ROW else 0
        shape[axis] = divide(shape[axis], tp_size, f"axis {axis} of {rule.mcore_name}")
    return tuple(shape)


def shard_parameter(rule: Rule, tp_rank: int, tp_size: int) -> Parameter:
    """One TP rank's shard, its parts in the shard's order.

    A parameter that is not cut (COPY) is the same on every rank. Errors: `UserError` for a tp_size
    that cannot cut the model.
    """
    if rule.kind is ShardKind.VOCABULARY:
        shape = shard_shape(rule, tp_size)
        start, vocab_size = tp_rank * shape[0], rule.hf_shapes[0][0]
        stop = min(start + shape[0], vocab_size)
        held = (_copy(rule, 0, 0, start, stop, 0),) if start < stop else ()
        return Parameter(rule.mcore_name, shape, held, max(0, stop - start))
    # Unit u is the u-th of `num_units` equal parts of each HF tensor in turn.
    axis, units, num_units = 0, range(tp_rank, tp_rank + 1), tp_size
    if rule.kind is ShardKind.COPY:
        units, num_units = range(1), 1
    elif rule.kind is ShardKind.ROW:
        axis = 1
    elif rule.kind is ShardKind.QKV:
        num_units = rule.num_groups
        per_rank = divide(num_units, tp_size, "num_key_value_heads")
        units = range(tp_rank * per_rank, (tp_rank + 1) * per_rank)
    parts: list[Copy] = []
    position = 0
    for unit in units:
        for index, hf_shape in enumerate(rule.hf_shapes):
            size = divide(
                hf_shape[axis], num_units, f"axis {axis} of {rule.hf_names[index]}"
            )
            parts.append(
                _copy(rule, index, axis, unit * size, (unit + 1) * size, position)
            )
            position += size
    shape = shard_shape(rule, tp_size)
    return Parameter(rule.mcore_name, shape, tuple(parts), shape[0])


def _copy(
    rule: Rule, index: int, axis: int, start: int, stop: int, position: int
) -> Copy:
    """[start, stop) of the HF tensor of this index along `axis`, whole along the other, to
    `position` onwards.
    """
    across = (*rule.hf_shapes[index], 1)[1 - axis]
    position_stop = position + stop - start
    if axis == 0:
        source = Rect(rule.hf_names[index], start, stop, 0, across)
        return Copy(source, Rect(rule.mcore_name, position, position_stop, 0, across))
    source = Rect(rule.hf_names[index], 0, across, start, stop)
    return Copy(source, Rect(rule.mcore_name, 0, across, position, position_stop))


@torch.no_grad()
def fill_shard(
    rule: Rule, read: ReadRect, shard: Tensor, *, tp_rank: int, tp_size: int
) -> None:
    """HF -> Megatron, in place: fills `shard` (any dtype or device), padding rows with zeros.

    From each HF tensor one rectangle is read, around the parts that this rank needs, one tensor at
    a time.
    """
    _check_shard(rule, shard, tp_size)
    parameter = shard_parameter(rule, tp_rank, tp_size)
    for hf_name in dict.fromkeys(part.source.tensor for part in parameter.parts):
        own = [part for part in parameter.parts if part.source.tensor == hf_name]
        last = own[-1].source
        around = own[0].source._replace(row1=last.row1, col1=last.col1)
        values = read(around)
        for part in own:
            part.target.view(shard).copy_(part.source.relative_to(around).view(values))
    shard[parameter.padding_row :].zero_()


@torch.no_grad()
def merge_shards(rule: Rule, shards: Sequence[Tensor]) -> dict[str, Tensor]:
    """The HF tensors of a rule from the shards of all TP ranks in order.

    Dtype and device of the first shard. New tensors, but views of a whole parameter (TP size 1)
    where they are one rectangle of it. Of a parameter that is not cut, rank 0's shard is taken.
    """
    parts: dict[str, list[tuple[Copy, Tensor]]] = {name: [] for name in rule.hf_names}
    for tp_rank, shard in enumerate(
        shards[:1] if rule.kind is ShardKind.COPY else shards
    ):
        _check_shard(rule, shard, len(shards))
        for part in shard_parameter(rule, tp_rank, len(shards)).parts:
            parts[part.source.tensor].append((part, shard))
    merged: dict[str, Tensor] = {}
    for (name, held), shape in zip(parts.items(), rule.hf_shapes, strict=True):
        if len(shards) == len(held) == 1:
            ((part, shard),) = held
            merged[name] = part.target.view(shard)
            continue
        merged[name] = shards[0].new_empty(shape)
        for part, shard in held:
            part.source.view(merged[name]).copy_(part.target.view(shard))
    return merged


def _check_shard(rule: Rule, shard: Tensor, tp_size: int) -> None:
    expected = shard_shape(rule, tp_size)
    if tuple(shard.shape) != expected:
        raise UserError(
            f"Megatron parameter {rule.mcore_name} has shape {list(shard.shape)} where the weight "
            f"table expects {list(expected)} at tensor-parallel size {tp_size}"
        )


def divide(size: int, tp_size: int, what: str, key: str = "parallel.tp") -> int:
    """The size of a part. Errors: `UserError` that names the key and what it should divide."""
    if size % tp_size:
        raise UserError(
            f"{key}={tp_size} does not divide {what}={size}; choose a divisor of {size}"
        )
    return size // tp_size
