"""Which slice of which HF tensor sits where in which tensor-parallel shard; no process group.

`shard_blocks` is the one definition of Megatron's layout. Filling a shard from HF tensors,
scattering it back, and the transfer plans all follow from it, so the two directions cannot
disagree. TP size 1 gives the whole Megatron parameter, which is what a checkpoint converter works
on.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

from megatron_opsft.architectures.template import Rule, ShardKind
from megatron_opsft.errors import UserError

ReadHfSlice = Callable[[str, int, int, int], Tensor]
"""(hf_name, axis, start, stop) -> that slice, whole along the other axis, like `HfTensors.read`."""


@dataclass(frozen=True, slots=True)
class Block:
    """Along `axis`, `hf_tensor[hf_start:hf_stop]` is `shard[shard_start:shard_stop]`."""

    hf_name: str
    axis: int
    hf_start: int
    hf_stop: int
    shard_start: int

    @property
    def shard_stop(self) -> int:
        return self.shard_start + self.hf_stop - self.hf_start


def padded_vocab_size(vocab_size: int, tp_size: int = 1, divisible_by: int = 128) -> int:
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
        shape[axis] = _divide(shape[axis], tp_size, f"axis {axis} of {rule.mcore_name}")
    return tuple(shape)


def shard_blocks(rule: Rule, tp_rank: int, tp_size: int) -> tuple[Block, ...]:
    """The blocks of one TP rank's shard, in the shard's order; together they cover it exactly once.

    Rows of the shard that no block covers are vocabulary padding (`padding_start`). A parameter
    that is not cut (COPY) gives every rank the same block.
    """
    if not 0 <= tp_rank < tp_size:
        raise ValueError(f"tp_rank {tp_rank} is not below tp_size {tp_size}")
    if rule.kind is ShardKind.COPY:
        return (Block(rule.hf_names[0], 0, 0, rule.hf_shapes[0][0], 0),)
    if rule.kind is ShardKind.VOCABULARY:
        rows = shard_shape(rule, tp_size)[0]
        start = tp_rank * rows
        stop = min(start + rows, rule.hf_shapes[0][0])
        return (Block(rule.hf_names[0], 0, start, stop, 0),) if start < stop else ()
    if rule.kind is ShardKind.ROW:
        return _interleaved(rule, axis=1, units=range(tp_rank, tp_rank + 1), num_units=tp_size)
    if rule.kind is ShardKind.QKV:
        per_rank = _divide(rule.num_groups, tp_size, "num_key_value_heads")
        units = range(tp_rank * per_rank, (tp_rank + 1) * per_rank)
        return _interleaved(rule, axis=0, units=units, num_units=rule.num_groups)
    return _interleaved(rule, axis=0, units=range(tp_rank, tp_rank + 1), num_units=tp_size)


def _interleaved(rule: Rule, *, axis: int, units: range, num_units: int) -> tuple[Block, ...]:
    """Units in a row; unit u is the u-th of `num_units` equal parts of each HF tensor in turn."""
    blocks = []
    position = 0
    for unit in units:
        for name, shape in zip(rule.hf_names, rule.hf_shapes, strict=True):
            size = _divide(shape[axis], num_units, f"axis {axis} of {name}")
            blocks.append(Block(name, axis, unit * size, (unit + 1) * size, position))
            position += size
    return tuple(blocks)


def padding_start(rule: Rule, tp_rank: int, tp_size: int) -> int:
    """First row of the shard that is vocabulary padding; its row count where there is none."""
    if rule.kind is not ShardKind.VOCABULARY:
        return shard_shape(rule, tp_size)[0]
    blocks = shard_blocks(rule, tp_rank, tp_size)
    return blocks[-1].shard_stop if blocks else 0


@torch.no_grad()
def fill_shard(rule: Rule, read: ReadHfSlice, shard: Tensor, *, tp_rank: int, tp_size: int) -> None:
    """HF -> Megatron, in place: fills `shard` (any dtype or device), padding rows with zeros.

    From each HF tensor one contiguous slice is read, the part this rank needs, one tensor at a
    time.
    """
    _check_shard(rule, shard, tp_size)
    blocks = shard_blocks(rule, tp_rank, tp_size)
    for hf_name in dict.fromkeys(block.hf_name for block in blocks):
        own = [block for block in blocks if block.hf_name == hf_name]
        start, stop = own[0].hf_start, own[-1].hf_stop
        source = read(hf_name, own[0].axis, start, stop)
        for block in own:
            part = source.narrow(block.axis, block.hf_start - start, block.hf_stop - block.hf_start)
            _shard_view(shard, block).copy_(part)
    shard[padding_start(rule, tp_rank, tp_size) :].zero_()


def shard_slices(
    rule: Rule, shard: Tensor, *, tp_rank: int, tp_size: int
) -> Iterator[tuple[Block, Tensor]]:
    """Megatron -> HF: each block with its view into `shard`; padding is left out."""
    _check_shard(rule, shard, tp_size)
    for block in shard_blocks(rule, tp_rank, tp_size):
        yield block, _shard_view(shard, block)


@torch.no_grad()
def scatter_shard(
    rule: Rule, shard: Tensor, targets: Mapping[str, Tensor], *, tp_rank: int, tp_size: int
) -> None:
    """Megatron -> HF, in place: writes this rank's part of the whole HF tensors, given by name."""
    for block, part in shard_slices(rule, shard, tp_rank=tp_rank, tp_size=tp_size):
        target = targets[block.hf_name]
        target.narrow(block.axis, block.hf_start, block.hf_stop - block.hf_start).copy_(part)


def merge_shards(rule: Rule, shards: Sequence[Tensor]) -> dict[str, Tensor]:
    """The HF tensors of a rule from the shards of all TP ranks in order.

    New tensors with the dtype and device of the first shard. Of a parameter that is not cut, rank
    0's is taken.
    """
    targets = {
        name: torch.empty(shape, dtype=shards[0].dtype, device=shards[0].device)
        for name, shape in zip(rule.hf_names, rule.hf_shapes, strict=True)
    }
    ranks: Iterable[int] = (0,) if rule.kind is ShardKind.COPY else range(len(shards))
    for tp_rank in ranks:
        scatter_shard(rule, shards[tp_rank], targets, tp_rank=tp_rank, tp_size=len(shards))
    return targets


def whole_tensors(rule: Rule, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The HF tensors of a whole parameter (TP size 1): views where each is one block of it, new
    tensors where they are interleaved.
    """
    slices = list(shard_slices(rule, parameter, tp_rank=0, tp_size=1))
    if len(slices) == len(rule.hf_names):
        yield from ((block.hf_name, part) for block, part in slices)
    else:
        yield from merge_shards(rule, [parameter]).items()


def _shard_view(shard: Tensor, block: Block) -> Tensor:
    return shard.narrow(block.axis, block.shard_start, block.shard_stop - block.shard_start)


def _check_shard(rule: Rule, shard: Tensor, tp_size: int) -> None:
    expected = shard_shape(rule, tp_size)
    if tuple(shard.shape) != expected:
        raise UserError(
            f"Megatron parameter {rule.mcore_name} has shape {list(shard.shape)} where the weight "
            f"table expects {list(expected)} at tensor-parallel size {tp_size}"
        )


def _divide(size: int, tp_size: int, what: str) -> int:
    if size % tp_size:
        raise UserError(
            f"parallel.tp={tp_size} does not divide {what}={size}; choose a divisor of {size}"
        )
    return size // tp_size
