"""Tensors in archives of `torch.save`: where their bytes lie, without reading them."""

from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.utils import _create_file_view

from megatron_opsft.errors import UserError, first_line
from megatron_opsft.storage.regions import Region


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
            raise UserError(f"{what} is damaged: no torch archive begins and ends there")
        archive.seek(0)
        try:
            with FakeTensorMode():
                tensor = torch.load(archive, weights_only=True, map_location="cpu")
        except Exception as error:  # a damaged archive can fail anywhere in torch's reader
            raise UserError(f"{what} is damaged: {first_line(error)[:200]}") from None
        if not isinstance(tensor, torch.Tensor):
            raise UserError(f"{what} is damaged: no tensor is stored there")
        offset = _offset(tensor, archive, what)
    if offset + tensor.nbytes > length:
        raise UserError(f"{what} is damaged: its bytes end behind the archive")
    return Region(path, start + offset, tuple(tensor.shape), tensor.dtype)


def _offset(tensor: torch.Tensor, archive: Any, what: str) -> int:
    storage = tensor.untyped_storage()
    offset: int | None = getattr(storage, "_checkpoint_offset", None)
    skipped = int(tensor.storage_offset()) * tensor.dtype.itemsize
    is_whole = tensor.is_contiguous() and skipped + tensor.nbytes <= storage.nbytes()
    if offset is None or not is_whole:
        raise UserError(f"{what} is damaged: it is not stored in one piece")
    # The next part of the zip must follow: readers take any length of a header for granted.
    archive.seek(offset + int(storage.nbytes()))
    if archive.read(2) != b"PK":
        raise UserError(f"{what} is damaged: its bytes are not where the archive says")
    return offset + skipped
