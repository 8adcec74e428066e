"""Tensors as they lie in files: contiguous bytes at an offset, read in pieces; and where they lie
in archives of `torch.save`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.utils import _create_file_view

from megatron_opsft.errors import UserError, first_line
from megatron_opsft.models.storage.large_files import Staging, read_into

_staging = Staging()
CHUNK_BYTES = (
    8 * 2**20
)  # what a thread reads and copies at a time: bounds resident memory


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
            target = out[first - start : last - start]
            straight = self._fits(target)
            place = _bytes_of(target) if straight else _staging.place_for(num_bytes)
            try:
                read_into(place, self.path, offset)
            except (OSError, EOFError) as error:
                raise UserError(f"{self.path} cannot be read: {error}") from None
            if not straight:
                rows = torch.frombuffer(place, dtype=self.dtype).view(target.shape)
                target.copy_(rows)
                check_cast(rows, target, f"{self.path}: tensor {name}")

    def _fits(self, target: Tensor) -> bool:
        """Whether bytes of the file can be read straight into the tensor's memory."""
        is_on_cpu = target.device.type == "cpu"
        return is_on_cpu and target.dtype is self.dtype and target.is_contiguous()


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


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


def row_chunks(start: int, stop: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """[start, stop) in consecutive ranges of at most CHUNK_BYTES, but of at least one row."""
    step = max(1, CHUNK_BYTES // max(row_bytes, 1))
    for first in range(start, stop, step):
        yield first, min(first + step, stop)


def archived_tensor(path: Path, start: int, length: int, what: str) -> Region:
    """Where the tensor lies that `torch.save` wrote into these bytes of a file; nothing else is
    unpickled.

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
        # A reader alone would find an archive that is shifted, too.
        first = archive.read(4)
        archive.seek(max(0, length - 22))
        if (first, archive.read(4)) != (b"PK\x03\x04", b"PK\x05\x06"):
            raise UserError(
                f"{what} is damaged: no torch archive begins and ends there"
            )
        archive.seek(0)
        try:
            with FakeTensorMode():
                tensor = torch.load(archive, weights_only=True, map_location="cpu")
        except (
            Exception
        ) as error:  # a damaged archive can fail anywhere in torch's reader
            raise UserError(f"{what} is damaged: {first_line(error)[:200]}") from None
        if not isinstance(tensor, torch.Tensor):
            raise UserError(f"{what} is damaged: no tensor is stored there")
        storage = tensor.untyped_storage()
        offset: int | None = getattr(storage, "_checkpoint_offset", None)
        skipped = int(tensor.storage_offset()) * tensor.dtype.itemsize
        is_whole = (
            tensor.is_contiguous() and skipped + tensor.nbytes <= storage.nbytes()
        )
        if offset is None or not is_whole:
            raise UserError(f"{what} is damaged: it is not stored in one piece")
        # The next part of the zip must follow: readers take any length of a header for granted.
        archive.seek(offset + int(storage.nbytes()))
        if archive.read(2) != b"PK" or offset + skipped + tensor.nbytes > length:
            raise UserError(
                f"{what} is damaged: its bytes are not where the archive says"
            )
    return Region(path, start + offset + skipped, tuple(tensor.shape), tensor.dtype)
