"""A checksum of a rectangle of an HF tensor that does not depend on how the tensor is cut.

It is s * sum over r, c of h(r) * g(c) * b(r, c) modulo 2^64. Rows r and columns c are counted in
the HF tensor, so the checksums of disjoint rectangles add up to that of their union. b is made of
the bits of one element, or of the few in 8 bytes; h, g and s are fixed odd pseudo-random numbers:
any single bit that differs changes the result, and so do rows or columns that changed places.
Integers wrap, so the result is the same on every device and in every order of summation.

The checksum of an engine parameter is the sum of those of its rectangles of HF tensors. So the
trainer's ranks can compute the expected value of every engine parameter from whatever pieces of it
they hold, each its own piece, and one sum over all ranks completes it. No process group.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from megatron_opsft.weights.rectangles import Copy, Parameter, Rect

_CHUNK_BYTES = 2**24  # of temporaries, which a GPU's cache holds
_CPU_CHUNK_BYTES = 2**21
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FOLD = 29
_ROWS, _COLUMNS, _SALTS = 1, 2, 3  # streams of the pseudo-random numbers
# Multipliers and shifts of the SplitMix64 generator, as signed 64-bit integers.
STEP64 = 0x9E3779B97F4A7C15 - 2**64
_MIX = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def unit_bytes(num_columns: int, itemsize: int, cuts: int) -> int:
    """How many bytes of a row `checksum` may take at a time: 8 where every piece allows it.

    num_columns: of the whole HF tensor. cuts: into how many equal parts its columns are cut at the
    finest; 1 where no holder cuts them, and the least common multiple of the holders' numbers where
    they do.
    """
    return 8 if num_columns * itemsize % (8 * cuts) == 0 else itemsize


@torch.no_grad()
def checksum(
    view: Tensor, rect: Rect, *, salt: int, unit_bytes: int, signed_zeros: bool = True
) -> Tensor:
    """The checksum of `rect`, whose values are `view`: an int64 scalar on the view's device.

    view: [rows, columns], or [rows] of a vector; any strides.
    salt: tells rectangles of different tensors apart, which may then be added up.
    unit_bytes: the function of that name; pieces of one tensor must agree on it.
    signed_zeros: False counts -0.0 as +0.0.
    Errors: ValueError if the shapes differ, or the unit does not divide the rectangle's columns.
    """
    matrix = view.detach() if view.dim() == 2 else view.detach()[:, None]
    edges = [edge * view.itemsize for edge in (rect.col0, rect.col1)]
    if matrix.shape != (rect.row1 - rect.row0, rect.col1 - rect.col0):
        raise ValueError(f"a tensor of shape {list(view.shape)} is not {rect}")
    if any(edge % unit_bytes for edge in edges):
        raise ValueError(f"the columns of {rect} are not whole units of {unit_bytes} bytes")
    rows = _numbers(_ROWS, rect.row0, rect.row1, view.device)
    columns = _numbers(_COLUMNS, edges[0] // unit_bytes, edges[1] // unit_bytes, view.device)
    numbers = _sum_rows(matrix, columns, unit_bytes, signed_zeros) * rows
    return numbers.sum() * _numbers(_SALTS, salt, salt + 1, view.device)[0]


def _sum_rows(matrix: Tensor, columns: Tensor, unit_bytes: int, signed_zeros: bool) -> Tensor:
    """sum over c of columns[c] * bits[r, c]: int64 [rows]."""
    use_product = _has_integer_product(matrix.device)
    step = max(1, (_CPU_CHUNK_BYTES if use_product else _CHUNK_BYTES) // (8 * len(columns)))
    sums = columns.new_empty(len(matrix))
    scratch = columns.new_empty(min(step, len(matrix)), len(columns))
    for first in range(0, len(matrix), step):
        chunk, out = matrix[first : first + step], sums[first : first + step]
        units = _units(chunk, scratch[: len(chunk)], unit_bytes, signed_zeros)
        if use_product:
            torch.mv(units, columns, out=out)
        else:
            torch.sum(units.mul_(columns), 1, out=out)
    return sums


def _has_integer_product(device: torch.device) -> bool:
    return device.type == "cpu"


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


def _is_aligned(chunk: Tensor) -> bool:
    """Whether the rows can be read as 64-bit numbers where they are."""
    strides = [stride * chunk.itemsize for stride in chunk.stride()[:-1]]
    offset = chunk.storage_offset() * chunk.itemsize
    return chunk.stride(-1) == 1 and all(n % 8 == 0 for n in (chunk.data_ptr(), offset, *strides))


def _units(chunk: Tensor, scratch: Tensor, unit_bytes: int, signed_zeros: bool) -> Tensor:
    """The bits of a chunk as numbers, int64 [rows, units], in `scratch`."""
    bits = _BITS[chunk.itemsize]
    if unit_bytes == 8 and signed_zeros and _is_aligned(chunk):
        words = chunk.view(torch.int64)
    else:
        copy = scratch.view(bits) if unit_bytes == 8 else scratch
        copy.copy_(chunk.view(bits))
        if not signed_zeros:
            # The mask as integers: on a CPU ten times as fast as with bool.
            copy *= torch.ne(copy, torch.iinfo(bits).min, out=torch.empty_like(copy))
        if unit_bytes < 8:
            return scratch
        words = scratch.clone()
    # A word's highest bit times any odd factor is the same: two changed signs would cancel. So the
    # high bits go into the low ones, too, by a shift that takes no sign to where another one is.
    return torch.bitwise_right_shift(words, _FOLD, out=scratch).add_(words)


def parameter_checksums(
    parameters: Sequence[Parameter],
    tensors: Mapping[str, Tensor],
    *,
    hf_columns: Mapping[str, int],
    cuts: int,
    signed_zeros: bool = True,
) -> list[int]:
    """The checksum of each parameter as its holder sees it, int64 values.

    A parameter that has another shape than described counts as 0, and so does one that is padding
    alone: the last ranks of a small vocabulary may hold no token of it.

    hf_columns: HF name -> columns of the whole tensor; cuts: into how many equal parts the trainer
    and the engine together cut columns (the least common multiple of both tensor-parallel sizes).
    """

    def pieces() -> Iterable[_Piece]:
        for index, parameter in enumerate(parameters):
            tensor = tensors[parameter.name]  # perhaps unpacked only now, and alive only here
            if tuple(tensor.shape) == parameter.shape:
                for salt, part in enumerate(parameter.parts):
                    yield index, salt, part, tensor

    return _sums(len(parameters), pieces(), hf_columns, cuts, signed_zeros).tolist()


def expected_checksums(
    parameters: Sequence[Parameter],
    held: Mapping[str, Sequence[Copy]],
    tensors: Mapping[str, Tensor],
    *,
    hf_columns: Mapping[str, int],
    cuts: int,
    signed_zeros: bool = True,
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
    return _sums(len(parameters), pieces, hf_columns, cuts, signed_zeros)


_Piece = tuple[int, int, Copy, Tensor]
"""Index of an engine parameter, index of its part as the salt, and what of it is in a tensor."""


def _sums(
    num_parameters: int,
    pieces: Iterable[_Piece],
    hf_columns: Mapping[str, int],
    cuts: int,
    signed_zeros: bool,
) -> Tensor:
    """The sum over the pieces of each parameter, int64 [num_parameters] on CPU."""
    indices: list[int] = []
    found: list[Tensor] = []
    for index, salt, piece, tensor in pieces:
        unit = unit_bytes(hf_columns[piece.source.tensor], tensor.itemsize, cuts)
        view = piece.target.view(tensor)
        indices.append(index)
        found.append(
            checksum(view, piece.source, salt=salt, unit_bytes=unit, signed_zeros=signed_zeros)
        )
    sums = torch.zeros(num_parameters, dtype=torch.int64)
    return sums.index_add_(0, torch.tensor(indices), torch.stack(found).cpu()) if found else sums
