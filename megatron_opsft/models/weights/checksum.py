"""A checksum of a rectangle of an HF tensor that does not depend on how the tensor is cut.

It is s * sum over r, c of h(r) * g(c) * b(r, c) modulo 2^64. Rows r and columns c are counted in
the HF tensor, so the checksums of disjoint rectangles add up to that of their union. b is made of
the bits of an element; h, g and s are fixed odd pseudo-random numbers: any single bit that differs
changes the result, and so do rows or columns that changed places. Integers wrap, so the result is
the same on every device and in every order of summation.

The checksum of an engine parameter is the sum of those of its rectangles of HF tensors. So the
trainer's ranks can compute the expected value of every engine parameter from whatever pieces of it
they hold, each its own piece, and one sum over all ranks completes it. No process group.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from megatron_opsft.models.weights.rectangles import Copy, Parameter, Rect

_CHUNK_BYTES = 2**24  # of temporaries, which a GPU's cache holds
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROWS, _COLUMNS, _SALTS = 1, 2, 3  # streams of the pseudo-random numbers
# Multipliers and shifts of the SplitMix64 generator, as signed 64-bit integers.
STEP64 = 0x9E3779B97F4A7C15 - 2**64
_MIX = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


@torch.no_grad()
def checksum(view: Tensor, rect: Rect, *, salt: int) -> Tensor:
    """The checksum of `rect`, whose values are `view`: an int64 scalar on the view's device.

    view: [rows, columns], or [rows] of a vector; any strides.
    salt: tells rectangles of different tensors apart, which may then be added up.
    Errors: ValueError if the shapes differ.
    """
    matrix = view.detach() if view.dim() == 2 else view.detach()[:, None]
    if matrix.shape != (rect.row1 - rect.row0, rect.col1 - rect.col0):
        raise ValueError(f"a tensor of shape {list(view.shape)} is not {rect}")
    bits = matrix.view(_BITS[matrix.itemsize])
    columns = _numbers(_COLUMNS, rect.col0, rect.col1, view.device)
    sums = [
        (chunk * columns).sum(1)
        for chunk in bits.split(max(1, _CHUNK_BYTES // columns.nbytes))
    ]
    numbers = torch.cat(sums) * _numbers(_ROWS, rect.row0, rect.row1, view.device)
    return numbers.sum() * _numbers(_SALTS, salt, salt + 1, view.device)[0]


@lru_cache(maxsize=64)
def _numbers(stream: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Odd pseudo-random int64 numbers `start` to `stop` - 1 of a stream."""
    values = torch.arange(start, stop, dtype=torch.int64, device=device) * 4 + stream
    return mix64(values * STEP64) | 1


def mix64(states: Tensor) -> Tensor:
    """The outputs of SplitMix64 in these states, int64, elementwise; integers wrap around."""
    for shift, factor in _MIX:
        states = (states ^ shift_right(states, shift)) * factor
    return states ^ shift_right(states, 31)


def shift_right(values: Tensor, by: int) -> Tensor:
    """int64 to the right, and zeros come in from the left: torch's own would copy the sign bit."""
    return (values >> by) & (2 ** (64 - by) - 1)


def parameter_checksums(
    parameters: Sequence[Parameter], tensors: Mapping[str, Tensor]
) -> list[int]:
    """The checksum of each parameter as its holder sees it, int64 values.

    A parameter that is not there or has another shape than described counts as 0, and so does one
    that is padding alone: the last ranks of a small vocabulary may hold no token of it.
    """
    pieces = (
        (index, salt, part, tensor)
        for index, parameter in enumerate(parameters)
        if (tensor := tensors.get(parameter.name)) is not None
        and tuple(tensor.shape) == parameter.shape
        for salt, part in enumerate(parameter.parts)
    )
    return _sums(len(parameters), pieces).tolist()


def expected_checksums(
    parameters: Sequence[Parameter],
    held: Mapping[str, Sequence[Copy]],
    tensors: Mapping[str, Tensor],
) -> Tensor:
    """This trainer rank's contribution to the checksum of each engine parameter, int64 [P] on CPU.

    held: HF name -> the parts that this rank answers for, of the parameters `tensors`. Over all
    ranks they must cover every HF tensor once.
    """
    pieces = (
        (index, salt, piece, tensors[piece.target.tensor])
        for index, parameter in enumerate(parameters)
        for salt, wanted in enumerate(parameter.parts)
        for part in held.get(wanted.source.tensor, ())
        if (piece := part.cut(wanted.source)) is not None
    )
    return _sums(len(parameters), pieces)


def _sums(
    num_parameters: int, pieces: Iterable[tuple[int, int, Copy, Tensor]]
) -> Tensor:
    """The sum over the pieces of each parameter, int64 [num_parameters] on CPU. A piece: indices of
    the parameter and of its part, which is the salt, and what of the part is in a tensor.
    """
    indices: list[int] = []
    found: list[Tensor] = []
    for index, salt, piece, tensor in pieces:
        indices.append(index)
        found.append(checksum(piece.target.view(tensor), piece.source, salt=salt))
    sums = torch.zeros(num_parameters, dtype=torch.int64)
    return (
        sums.index_add_(0, torch.tensor(indices), torch.stack(found).cpu())
        if found
        else sums
    )
