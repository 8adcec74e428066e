"""Tensors as they lie in files: contiguous bytes at an offset, mapped or read in pieces."""

import io
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, BinaryIO

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_opsft.errors import UserError
from megatron_opsft.storage.direct_io import read_own

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

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows along axis 0: a view of a mapping that lives as long as the tensor.

        Errors: `UserError` when the file cannot be opened or has become shorter.
        """
        shape = (stop - start, *self.shape[1:])
        first, num_bytes = self.offset_of(start), (stop - start) * self.row_bytes
        if num_bytes == 0:
            return torch.empty(shape, dtype=self.dtype)
        aligned = first - first % mmap.ALLOCATIONGRANULARITY
        try:
            with open(self.path, "rb") as file:
                # Copy on write: torch wants writable memory, and the file must not change.
                mapped = mmap.mmap(
                    file.fileno(),
                    first - aligned + num_bytes,
                    access=mmap.ACCESS_COPY,
                    offset=aligned,
                )
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path} cannot be read: {error}") from None
        flat = torch.frombuffer(mapped, dtype=self.dtype, count=prod(shape), offset=first - aligned)
        return flat.view(shape)

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
                data = read_own(self.path, offset, num_bytes)
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


class FileSlice(io.RawIOBase):
    """Bytes [start, start + length) of an open file, as a file of its own."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        super().__init__()
        self._file, self._start, self._length, self._position = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        wanted = min(len(buffer), self._length - self._position)
        if wanted <= 0:
            return 0
        self._file.seek(self._start + self._position)
        read = self._file.readinto(memoryview(buffer)[:wanted])  # type: ignore[attr-defined]
        self._position += read
        return read


def load_without_data(file: IO[bytes], what: str) -> object:
    """What `torch.load` would return, with tensors that have no data.

    Their storages know the offset of their bytes in `file` (`data_offset`). Only tensors and plain
    containers are accepted. Errors: `UserError` naming `what`.
    """
    try:
        with FakeTensorMode():
            return torch.load(file, weights_only=True, map_location="cpu")
    except Exception as error:  # a damaged archive can fail anywhere in torch's reader
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{what} is damaged or not a torch archive: {reason[:200]}") from None


def data_offset(tensor: Tensor, file: IO[bytes], what: str) -> int:
    """Where the bytes of a tensor of `load_without_data` begin in its file.

    Errors: `UserError` for a tensor whose bytes are not one row-major run, or not where the archive
    says.
    """
    storage = tensor.untyped_storage()
    offset: int | None = getattr(storage, "_checkpoint_offset", None)
    skipped = int(tensor.storage_offset()) * tensor.dtype.itemsize
    if offset is None or not tensor.is_contiguous() or skipped + tensor.nbytes > storage.nbytes():
        raise UserError(f"{what} is not stored in one piece; save it again with clone()")
    # The next part of the zip must follow: readers take any length of a header for granted.
    file.seek(offset + int(storage.nbytes()))
    if file.read(2) != b"PK":
        raise UserError(f"{what} is damaged: its bytes are not where the archive says")
    return offset + skipped


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """An unbuffered file for reading. Errors: `UserError`."""
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed below
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    with file:
        yield file  # type: ignore[misc]
