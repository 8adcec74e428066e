"""The bytes around a tensor in a file of torch.save, without writing the tensor."""

from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import torch

from megatron_opsft.storage.regions import data_offset, load_without_data, opened


@dataclass(frozen=True, slots=True)
class Archive:
    """`before`, then `data_bytes` of the tensor's own bytes, then `behind`."""

    before: bytes
    behind: bytes
    data_bytes: int

    @property
    def num_bytes(self) -> int:
        return len(self.before) + self.data_bytes + len(self.behind)


def archive_of(shape: tuple[int, ...], dtype: torch.dtype, scratch: Path) -> Archive:
    """What torch.save puts around a contiguous tensor; the same for all of this shape and dtype.

    A file with a hole in place of the data is written to `scratch` and removed again.
    """
    path = scratch / "archive"  # its name is part of the archive
    tensor = torch.empty(shape, dtype=dtype)  # never touched, so it takes no memory
    try:
        with torch.serialization.skip_data():
            torch.save(tensor, path)
        with opened(path) as file:
            stored = load_without_data(cast(IO[bytes], file), str(path))
            assert isinstance(stored, torch.Tensor)
            start = data_offset(stored, cast(IO[bytes], file), str(path))
            file.seek(0)
            before = file.read(start)
            file.seek(start + tensor.nbytes)
            behind = file.read()
    finally:
        path.unlink(missing_ok=True)
    return Archive(before=before, behind=behind, data_bytes=tensor.nbytes)
