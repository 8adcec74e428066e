"""Of a message the elements that have changed since the last one: exact, on bits.

A delta is the positions in the message, int32, followed by the bits of their values. It is used
where it is shorter than the message. NaNs and zeros are compared as bits, like everything else.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_POSITION = torch.int32
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

WHOLE = -1
"""In place of the number of changed elements: the whole message is sent."""


def as_bits(tensor: Tensor) -> Tensor:
    """The same memory as integers of that size."""
    return tensor.view(_BITS[tensor.itemsize])


def delta_bytes(num_changed: int, itemsize: int) -> int:
    """Size of a delta."""
    return num_changed * (_POSITION.itemsize + itemsize)


def encode(now: Sequence[Tensor], before: Sequence[Tensor]) -> tuple[int, Tensor | None]:
    """How many elements of a message differ, and the delta, uint8; None where it is not shorter
    than the message.

    now, before: the message's places, [rows] or [rows, columns] each, of one dtype.
    """
    positions: list[Tensor] = []
    values: list[Tensor] = []
    start = 0
    for mine, old in zip(now, before, strict=True):
        bits = as_bits(mine)
        inside = (bits != as_bits(old)).flatten().nonzero()[:, 0]
        positions.append(inside.to(_POSITION) + start)
        values.append(bits.flatten()[inside])
        start += mine.numel()
    num_changed, itemsize = sum(map(len, positions)), now[0].itemsize
    if delta_bytes(num_changed, itemsize) >= start * itemsize:
        return num_changed, None
    parts = torch.cat(positions).view(torch.uint8), torch.cat(values).view(torch.uint8)
    return num_changed, torch.cat(parts)


def apply(delta: Tensor, places: Sequence[Tensor]) -> None:
    """Write a delta into the message's places, [rows] or [rows, columns] each, one behind the
    other as in the message.
    """
    num_changed = len(delta) // delta_bytes(1, places[0].itemsize)
    split = num_changed * _POSITION.itemsize
    positions = delta[:split].view(_POSITION).long()
    values = delta[split:].view(_BITS[places[0].itemsize])
    ends = torch.tensor([place.numel() for place in places]).cumsum(0)
    cuts = [0, *torch.searchsorted(positions, ends.to(positions.device)).tolist()]
    start = 0
    for place, first, last in zip(places, cuts, cuts[1:], strict=False):
        if first < last:
            inside = positions[first:last] - start
            target = as_bits(place)
            if place.dim() == 1:
                target[inside] = values[first:last]
            else:
                columns = place.shape[1]
                target[inside // columns, inside % columns] = values[first:last]
        start += place.numel()
