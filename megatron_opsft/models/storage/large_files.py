"""Large files, read and written in pieces by several threads at a time, and the regions of tensors
in them: contiguous bytes at an offset. An archive of `torch.save` has such a region, too.
"""

import mmap
import os
import threading
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.utils import _create_file_view

from megatron_opsft.errors import UserError, first_line
from megatron_opsft.models.weights.rectangles import num_rows
from megatron_opsft.records import TensorShape
from megatron_opsft.runtime.durable import write_at

PAGE = 4096  # the fewest bytes that a disk reads or writes
# A thread reads and copies so much at a time, which bounds resident memory.
CHUNK_BYTES = 8 * 2**20


class LargeFile:
    """A file of known size, whose pieces several threads may write at a time."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        """Create the file, or open it with its content, and make it `num_bytes` long."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.ftruncate(self._file, num_bytes)

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Write bytes at `offset`. The disk begins at once, while the caller makes more."""
        write_at(self._file, memoryview(data), offset)
        if hasattr(os, "posix_fadvise"):
            # DONTNEED makes Linux write new pages now; those being written stay in its cache.
            os.posix_fadvise(self._file, offset, len(data), os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        """Wait until everything is on disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file; `sync` must be called before if the data has to be on disk."""
        os.close(self._file)


class Staging(threading.local):
    """A buffer that each thread uses again and again: fresh pages cost more than copying does."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, PAGE)

    def place_for(self, num_bytes: int) -> memoryview:
        """Return memory that begins at a page; it is valid until the thread's next call."""
        if num_bytes > len(self._memory):
            self._memory = mmap.mmap(-1, num_bytes)
        return memoryview(self._memory)[:num_bytes]


_staging = Staging()


class Region(NamedTuple):
    """The bytes of a tensor, or of some rows of one, in a file; row-major."""

    path: Path
    offset: int
    """Where they begin in the file."""
    shape: TensorShape
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        return prod(self.shape[1:]) * self.dtype.itemsize

    def offset_of(self, row: int) -> int:
        """Return where a row begins in the file."""
        return self.offset + row * self.row_bytes

    def copy_rows(self, start: int, out: Tensor, name: str) -> None:
        """Read as many rows as `out` has, from row `start` on, and cast them into it.

        name: name of the tensor, for errors. Errors: `UserError` if the file cannot be read or has
        become shorter, or if a value is too large for the dtype of `out`.
        """
        for first, last in row_chunks(start, start + len(out), self.row_bytes):
            num_bytes = (last - first) * self.row_bytes
            if num_bytes == 0:
                continue
            target = out[first - start : last - start]
            # True if the bytes of the file are those of `target`, and can be read into its memory.
            is_direct = (
                target.device.type == "cpu"
                and target.dtype is self.dtype
                and target.is_contiguous()
            )
            memory = memory_of(target) if is_direct else _staging.place_for(num_bytes)
            try:
                _read_into(memory, self.path, self.offset_of(first))
            except (OSError, EOFError) as error:
                raise UserError(f"{self.path} cannot be read: {error}") from None
            if not is_direct:
                rows = torch.frombuffer(memory, dtype=self.dtype).view(target.shape)
                target.copy_(rows)
                check_cast(rows, target, f"{self.path}: tensor {name}")


def copy_region(source: Region, target: Region, file: LargeFile, name: str) -> None:
    """Copy a tensor of the same shape and dtype into an open file, some rows at a time.

    target: where it goes in `file`. name: of the tensor, for errors. Errors: those of
    `Region.copy_rows`.
    """
    for first, last in row_chunks(0, num_rows(source.shape), source.row_bytes):
        rows = torch.empty(last - first, *source.shape[1:], dtype=source.dtype)
        source.copy_rows(first, rows, name)
        file.write(memory_of(rows), target.offset_of(first))


def memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def check_cast(values: Tensor, cast: Tensor, what: str) -> None:
    """Check that no finite value became infinite in another dtype. Errors: `UserError`."""
    largest = torch.finfo(cast.dtype).max
    if torch.finfo(values.dtype).max <= largest or not cast.isinf().any():
        return
    too_large = values[cast.isinf() & values.isfinite()]
    if too_large.numel():
        dtype = str(cast.dtype).removeprefix("torch.")
        wider = "bfloat16 or float32" if cast.dtype is torch.float16 else "float32"
        raise UserError(
            f"{what} holds {too_large[0].item():g}, but {dtype} goes to {largest:g} only; "
            f"choose {wider}"
        )


def row_chunks(start: int, stop: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut [start, stop) into ranges of at most CHUNK_BYTES, but of at least one row."""
    step = max(1, CHUNK_BYTES // max(row_bytes, 1))
    for first in range(start, stop, step):
        yield first, min(first + step, stop)


def archived_tensor(path: Path, start: int, length: int, what: str) -> Region:
    """Find the data of the tensor that `torch.save` wrote into these bytes of a file.

    The data is not read, and only tensors and plain values are unpickled.
    Errors: `UserError` naming `what` for an archive that does not fill these bytes, is damaged, or
    holds no contiguous tensor.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    with file:
        if min(start, length) < 0:
            raise UserError(f"{what} is damaged: it begins before its file")
        archive: Any = _create_file_view(file, start, length)
        tensor = _load_without_data(archive, length, what)
        storage = tensor.untyped_storage()
        storage_start = getattr(storage, "_checkpoint_offset", None)
        # Where the tensor begins and ends in its storage.
        first_byte = int(tensor.storage_offset()) * tensor.dtype.itemsize
        end = first_byte + tensor.nbytes
        is_whole = tensor.is_contiguous() and end <= storage.nbytes()
        if storage_start is None or not is_whole:
            raise UserError(f"{what} is damaged: it is not stored in one piece")
        # The next entry of the zip must follow: readers do not check the length of a header.
        archive.seek(storage_start + int(storage.nbytes()))
        if archive.read(2) != b"PK" or storage_start + end > length:
            raise UserError(
                f"{what} is damaged: its bytes are not where the archive says"
            )
    offset = start + storage_start + first_byte
    return Region(path, offset, tuple(tensor.shape), tensor.dtype)


def _load_without_data(archive: Any, length: int, what: str) -> Tensor:
    """Unpickle the tensor of an archive of `length` bytes; its data is not read.

    Errors: `UserError` naming `what`.
    """
    # torch's reader would also find an archive that begins or ends elsewhere.
    head = archive.read(4)
    archive.seek(max(0, length - 22))
    if head != b"PK\x03\x04" or archive.read(4) != b"PK\x05\x06":
        raise UserError(f"{what} is damaged: no torch archive begins and ends there")
    archive.seek(0)
    try:
        with FakeTensorMode():
            tensor = torch.load(archive, weights_only=True, map_location="cpu")
    # A damaged archive can fail anywhere in torch's reader.
    except Exception as error:
        raise UserError(f"{what} is damaged: {first_line(error)[:200]}") from None
    if not isinstance(tensor, torch.Tensor):
        raise UserError(f"{what} is damaged: no tensor is stored there")
    return tensor


def _read_into(memory: memoryview, path: Path, offset: int) -> None:
    """Fill the memory with bytes of a file from `offset` on. Errors: `OSError`, `EOFError`."""
    with open(path, "rb") as file:
        file.seek(offset)
        num_bytes = file.readinto(memory)
    if num_bytes < len(memory):
        raise EOFError(f"it ends at byte {offset + num_bytes}")
