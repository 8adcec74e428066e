"""A checksum of a rectangle of an HF tensor that does not depend on how the tensor is cut.

It is s * sum over r, c of h(r) * g(c) * b(r, c) modulo 2^64. Rows r and columns c are counted in
the HF tensor, so the checksums of disjoint rectangles add up to that of their union. b is made of
the bits of an element; h, g and s are fixed odd pseudo-random numbers: any single bit that differs
changes the result, and so do rows or columns that changed places. Integers wrap, so the result is
the same on every device and in every order of summation.

The checksum of an engine parameter is the sum of those of its rectangles of HF tensors, in the
engine's dtype. So the trainer's ranks can compute the expected checksum of every engine parameter:
each rank adds up those of the pieces that it holds, and one sum over all ranks completes it. No
collective is called here.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from megatron_opsft.models.weights.rectangles import Copy, Parameter, Rect
from megatron_opsft.runtime.splitmix import STEP64, mix64

_CHUNK_BYTES = 2**24  # of temporaries, which a GPU's cache holds
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROWS, _COLUMNS, _SALTS = 1, 2, 3  # streams of the pseudo-random numbers


@torch.no_grad()
def checksum(view: Tensor, rect: Rect, *, salt: int) -> Tensor:
    """Return the checksum of `rect`, whose values are `view`: an int64 scalar on its device.

    view: [rows, columns], or [rows] of a vector; any strides.
    salt: number of the rectangle. Rectangles of different tensors get different salts, so that
    their checksums can be added up.
    Errors: ValueError if the shapes differ.
    """
    matrix = view.detach()
    if matrix.dim() != 2:
        matrix = matrix[:, None]
    if matrix.shape != (rect.row1 - rect.row0, rect.col1 - rect.col0):
        raise ValueError(f"a tensor of shape {list(view.shape)} is not {rect}")
    bits = matrix.view(_BITS[matrix.itemsize])
    columns = _odd_numbers(_COLUMNS, rect.col0, rect.col1, view.device)
    rows_in_chunk = max(1, _CHUNK_BYTES // columns.nbytes)
    row_sums = [(chunk * columns).sum(1) for chunk in bits.split(rows_in_chunk)]
    rows = _odd_numbers(_ROWS, rect.row0, rect.row1, view.device)
    total = (torch.cat(row_sums) * rows).sum()
    return total * _odd_numbers(_SALTS, salt, salt + 1, view.device)[0]


@lru_cache(maxsize=64)
def _odd_numbers(stream: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Return the odd pseudo-random int64 numbers `start` to `stop` - 1 of a stream."""
    values = torch.arange(start, stop, device=device) * 4 + stream
    return mix64(values * STEP64) | 1


def parameter_checksums(
    parameters: Sequence[Parameter], tensors: Mapping[str, Tensor]
) -> list[int]:
    """Return the int64 checksum of each engine parameter, from the engine's own `tensors`.

    A parameter that is missing or has another shape than described counts as 0. So does one that
    is only padding: the last ranks of a small vocabulary may hold no token of it.
    """
    pieces = []
    for index, parameter in enumerate(parameters):
        tensor = tensors.get(parameter.name)
        if tensor is None or tuple(tensor.shape) != parameter.shape:
            continue
        for salt, copy in enumerate(parameter.copies):
            view = copy.target.view(tensor)
            pieces.append((index, checksum(view, copy.source, salt=salt)))
    return _sum_by_index(pieces, len(parameters)).tolist()


def expected_checksums(
    parameters: Sequence[Parameter],
    shard_copies: Mapping[str, Sequence[Copy]],
    shards: Mapping[str, Tensor],
) -> Tensor:
    """Return this trainer rank's contribution to the checksum of each engine parameter, int64 [P]
    on the CPU.

    shard_copies: HF name -> copies from that tensor to this rank's shards, only those that this
    rank counts: over all ranks every element of every HF tensor is counted exactly once. shards:
    this rank's shards by name.
    """
    pieces = []
    for index, parameter in enumerate(parameters):
        for salt, engine_copy in enumerate(parameter.copies):
            wanted = engine_copy.source
            for shard_copy in shard_copies.get(wanted.tensor, ()):
                copy = shard_copy.cut(wanted)
                if copy is not None:
                    view = copy.target.view(shards[copy.target.tensor])
                    if parameter.is_float32:
                        view = view.float()
                    pieces.append((index, checksum(view, copy.source, salt=salt)))
    return _sum_by_index(pieces, len(parameters))


def _sum_by_index(pieces: Sequence[tuple[int, Tensor]], num_parameters: int) -> Tensor:
    """Add up the checksums of each parameter, int64 [num_parameters] on the CPU.

    pieces: (index of the parameter, checksum).
    """
    sums = torch.zeros(num_parameters, dtype=torch.int64)
    if pieces:
        indices, checksums = zip(*pieces, strict=True)
        sums.index_add_(0, torch.tensor(indices), torch.stack(checksums).cpu())
    return sums
