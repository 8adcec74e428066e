"""Megatron's layout: where each rectangle of an HF tensor lies in a tensor-parallel shard.

`shard_parameter` is its only definition. Filling a shard from HF tensors, merging shards, and the
transfer schedules all follow from it, so the two directions cannot disagree. TP size 1 gives the
whole Megatron parameter, which a checkpoint converter works on. Pure: `filling` moves the values.
"""

from collections.abc import Iterator
from math import lcm
from typing import NamedTuple

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
    axis = rule.kind.axis
    copies = []
    position = 0
    for strip in _strips(rule, tp_rank, tp_size):
        tensor = whole(strip.hf_name, rule.hf_shapes[strip.hf_name])
        # Beyond the HF vocabulary `strip` makes it shorter, or empty.
        source = tensor.strip(axis, strip.start, strip.start + strip.size)
        # How far the strip moves along the axis, from the HF tensor to the shard.
        move = position - strip.start
        target = source.shift(move, 0) if axis == 0 else source.shift(0, move)
        if source.num_elements:  # else all of it is padding
            copies.append(Copy(source, target._replace(tensor=rule.mcore_name)))
        position += strip.size
    return Parameter(rule.mcore_name, shard_shape(rule, tp_size), tuple(copies))


class _Strip(NamedTuple):
    """Consecutive rows of an HF tensor, or columns if the kind of the rule cuts these."""

    hf_name: str
    start: int
    size: int


def _strips(rule: WeightRule, tp_rank: int, tp_size: int) -> Iterator[_Strip]:
    """Yield the strips of HF tensors that make up a TP rank's shard, in the shard's order."""
    kind = rule.kind
    if kind in (ShardKind.QKV, ShardKind.GATED_QKV):
        num_groups = divide(rule.num_groups, tp_size, "num_key_value_heads")
        for group in range(tp_rank * num_groups, (tp_rank + 1) * num_groups):
            yield from _strips_of_group(rule, group)
    elif kind is ShardKind.COPY:
        for hf_name, hf_shape in rule.hf_shapes.items():
            yield _Strip(hf_name, 0, hf_shape[0])
    elif kind is ShardKind.VOCABULARY:
        # The padded vocabulary is cut, so the last strips reach beyond the HF tensor.
        size = shard_shape(rule, tp_size)[0]
        for hf_name in rule.hf_shapes:
            yield _Strip(hf_name, tp_rank * size, size)
    elif kind is ShardKind.ROW:
        for hf_name, hf_shape in rule.hf_shapes.items():
            size = divide(hf_shape[1], tp_size, f"axis 1 of {hf_name}")
            yield _Strip(hf_name, tp_rank * size, size)
    else:
        for section in rule.sections:
            what = f"axis 0 of {section.hf_name}"
            size = divide(section.num_rows, tp_size, what)
            yield _Strip(section.hf_name, section.start + tp_rank * size, size)


def _strips_of_group(rule: WeightRule, group: int) -> Iterator[_Strip]:
    """Yield the strips of one query group: of the q heads, then of the k head and the v head."""
    for hf_name, hf_shape in rule.hf_shapes.items():
        size = divide(hf_shape[0], rule.num_groups, f"axis 0 of {hf_name}")
        start = group * size
        is_query = size > rule.head_dim
        if rule.kind is ShardKind.QKV or not is_query:
            yield _Strip(hf_name, start, size)
            continue
        # The query and the gate of a head follow each other in the HF tensor.
        heads = range(start, start + size, 2 * rule.head_dim)
        for query in heads:
            yield _Strip(hf_name, query, rule.head_dim)
        for query in heads:
            yield _Strip(hf_name, query + rule.head_dim, rule.head_dim)
