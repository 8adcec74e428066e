"""Megatron's layout: where each rectangle of an HF tensor lies in a tensor-parallel shard.

`shard_parameter` is its only definition. Filling a shard from HF tensors, merging shards, and the
transfer schedules all follow from it, so the two directions cannot disagree. TP size 1 gives the
whole Megatron parameter, which a checkpoint converter works on. Pure: `filling` moves the values.
"""

from math import lcm

from megatron_opsft.models.architectures.sharding import divide
from megatron_opsft.models.architectures.template import ShardKind, WeightRule
from megatron_opsft.models.weights.rectangles import Copy, Parameter, whole
from megatron_opsft.records import TensorShape
from megatron_opsft.runtime.rounding import round_up

_VOCABULARY_MULTIPLE = 128


def padded_vocab_size(vocab_size: int, tp_size: int = 1) -> int:
    """Return the rows of the Megatron embedding: `vocab_size` rounded up so that TP divides it.

    It becomes a multiple of lcm(128, tp_size), not of their product as in Megatron: so the
    size is the same for every power of two up to 128, and a distributed checkpoint loads at another
    TP without resizing.
    """
    return round_up(vocab_size, lcm(_VOCABULARY_MULTIPLE, tp_size))


def shard_shape(rule: WeightRule, tp_size: int) -> TensorShape:
    """Return the shape of a parameter's shard, the same on every TP rank."""
    shape = list(rule.mcore_shape)
    if rule.kind is not ShardKind.COPY:
        axis = rule.kind.axis
        shape[axis] = divide(shape[axis], tp_size, f"axis {axis} of {rule.mcore_name}")
    return tuple(shape)


def shard_parameter(rule: WeightRule, tp_rank: int, tp_size: int) -> Parameter:
    """Describe one TP rank's shard, its copies in the shard's order.

    A parameter that is not cut (COPY) is the same on every rank. Errors: `UserError` for a tp_size
    that cannot cut the model.
    """
    # Along one axis, each HF tensor consists of `num_units` equal units: one for each rank, or the
    # groups of query, key and value heads. The shard has the units [first, last) one after another,
    # each with its strips of all HF tensors in turn.
    axis = rule.kind.axis
    num_units, first, last = tp_size, tp_rank, tp_rank + 1
    if rule.kind is ShardKind.COPY:
        num_units, first, last = 1, 0, 1
    elif rule.kind is ShardKind.QKV:
        num_units = rule.num_groups
        units_per_rank = divide(num_units, tp_size, "num_key_value_heads")
        first, last = tp_rank * units_per_rank, (tp_rank + 1) * units_per_rank
    copies = []
    position = 0
    for unit in range(first, last):
        for hf_name, hf_shape in rule.hf_shapes.items():
            if rule.kind is ShardKind.VOCABULARY:
                # The padded vocabulary is cut, so the last units reach beyond the HF tensor:
                # `strip` makes them shorter, or empty.
                size = shard_shape(rule, tp_size)[0]
            else:
                size = divide(hf_shape[axis], num_units, f"axis {axis} of {hf_name}")
            start = unit * size
            source = whole(hf_name, hf_shape).strip(axis, start, start + size)
            # How far the strip moves along the axis, from the HF tensor to the shard.
            move = position - start
            target = source.shift(move, 0) if axis == 0 else source.shift(0, move)
            if source.num_elements:  # else all of it is padding
                copies.append(Copy(source, target._replace(tensor=rule.mcore_name)))
            position += size
    return Parameter(rule.mcore_name, shard_shape(rule, tp_size), tuple(copies))
