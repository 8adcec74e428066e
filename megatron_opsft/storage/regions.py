"""Tensors as they lie in files: contiguous bytes at an offset, read in pieces."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megatron_opsft.errors import UserError
from megatron_opsft.storage.direct_io import Staging

_staging = Staging()
CHUNK_BYTES = 32 * 2**20  # what is read and copied at a time: bounds resident memory


@dataclass(frozen=True, slots=True)
class Region:
    """A whole tensor, or a stored part of one: `offset` bytes into `path`, row-major."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        return prod(self.shape[1:]) * self.dtype.itemsize

    def offset_of(self, row: int) -> int:
        """Where a row begins in the file."""
        return self.offset + row * self.row_bytes

    def copy_rows(self, start: int, stop: int, out: Tensor, name: str) -> None:
        """Rows along axis 0, read from disk and cast into `out`, which has their shape.

        name: of the tensor. Errors: `UserError` when the file cannot be read or has become shorter,
        or when a value is too large for the dtype of `out`.
        """
        for first, last in row_chunks(start, stop, self.row_bytes):
            offset, num_bytes = self.offset_of(first), (last - first) * self.row_bytes
            if num_bytes == 0:
                continue
            try:
                data = _staging.read(self.path, offset, num_bytes)
            except (OSError, EOFError) as error:
                raise UserError(f"{self.path} cannot be read: {error}") from None
            rows = _typed(data, self.dtype, offset).view(last - first, *self.shape[1:])
            target = out[first - start : last - start]
            target.copy_(rows)
            check_cast(rows, target, f"{self.path}: tensor {name}")


def check_cast(values: Tensor, cast: Tensor, what: str) -> None:
    """Errors: `UserError` naming `what` where a finite value became infinite in another dtype."""
    largest = torch.finfo(cast.dtype).max
    if torch.finfo(values.dtype).max <= largest or not cast.isinf().any():
        return
    lost = values[cast.isinf() & values.isfinite()]
    if lost.numel():
        dtype = str(cast.dtype).removeprefix("torch.")
        wider = "bfloat16 or float32" if cast.dtype is torch.float16 else "float32"
        raise UserError(
            f"{what} holds {lost[0].item():g}, but {dtype} goes to {largest:g} only; choose {wider}"
        )


def _typed(data: memoryview, dtype: torch.dtype, offset: int) -> Tensor:
    """The bytes as a flat tensor; a copy of them where no such tensor can begin at their offset."""
    if offset % dtype.itemsize:
        return torch.frombuffer(bytearray(data), dtype=dtype)
    return torch.frombuffer(data, dtype=dtype)


def row_chunks(start: int, stop: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """[start, stop) in consecutive ranges of at most CHUNK_BYTES, but of at least one row."""
    step = max(1, CHUNK_BYTES // max(row_bytes, 1))
    for first in range(start, stop, step):
        yield first, min(first + step, stop)
