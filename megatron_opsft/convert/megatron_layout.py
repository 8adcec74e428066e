"""The files of a Megatron checkpoint of format torch_dist: archives one behind the other."""

import io
import json
import pickle
import tempfile
from functools import cache
from math import prod
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_opsft.storage.direct_io import ALIGNMENT
from megatron_opsft.storage.hf_writer import FileLayout, Target
from megatron_opsft.storage.model_paths import (
    COMMON_NAME,
    FORMAT_NAME,
    METADATA_NAME,
    RECORD_NAME,
    TORCH_DIST_FORMAT,
)
from megatron_opsft.storage.partial import PlannedFile
from megatron_opsft.storage.regions import Region, archived_tensor
from megatron_opsft.weights.checkpoint_keys import (
    Entry,
    entry_of,
    extra_state_keys,
    lead_sizes,
)
from megatron_opsft.weights.rules import Rule, WeightTable
from megatron_opsft.weights.slicing import shard_parameter

_SMALL_ALIGNMENT = 64  # as torch's archives align their tensors


def megatron_layout(table: WeightTable, dtype: torch.dtype, max_file_bytes: int) -> FileLayout:
    """A Megatron checkpoint of format torch_dist; table: with TransformerEngine's names."""
    layout = _DistLayout(dtype, max_file_bytes)
    sizes = lead_sizes(table)
    for rule in table.exported:
        layout.add_tensor(rule, entry_of(rule.mcore_name), sizes)
    for key in extra_state_keys(table):
        layout.add_object(key)
    return layout.finish()


class _DistLayout:
    """Lays archives one behind the other into files, and keeps Megatron's metadata of them."""

    def __init__(self, dtype: torch.dtype, max_file_bytes: int) -> None:
        self._dtype, self._max_file_bytes = dtype, max_file_bytes
        self._files: list[list[tuple[int, bytes]]] = [[]]
        self._ends = [0]
        self._targets: list[Target] = []
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._objects: dict[str, BytesStorageMetadata] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}
        self._empty = _saved([None])

    def _reserve(
        self, num_bytes: int, header_bytes: int = 0, alignment: int = 1
    ) -> tuple[int, int]:
        """(index of the file, offset) of the next `num_bytes`.

        What comes behind their first `header_bytes` is aligned.
        """
        if self._ends[-1] and self._ends[-1] + num_bytes > self._max_file_bytes:
            self._files.append([])
            self._ends.append(0)
        start = self._ends[-1]
        start += -(start + header_bytes) % alignment
        self._ends[-1] = start + num_bytes
        return len(self._files) - 1, start

    def add_tensor(self, rule: Rule, entry: Entry, lead: dict[str, tuple[int, ...]]) -> None:
        """One layer (or expert) of a tensor: a chunk with one index on each prepended axis."""
        shape = (*(1 for _ in entry.lead), *rule.mcore_shape)
        before, behind = _around(shape, self._dtype)
        data_bytes = prod(shape) * self._dtype.itemsize
        # Whole pages are what disks read and write fastest; small tensors would waste most of one.
        alignment = ALIGNMENT if data_bytes >= ALIGNMENT else _SMALL_ALIGNMENT
        num_bytes = len(before) + data_bytes + len(behind)
        file, start = self._reserve(num_bytes, len(before), alignment)
        data = start + len(before)
        self._files[file] += [(start, before), (data + data_bytes, behind)]
        region = Region(Path(_file_name(file)), data, rule.mcore_shape, self._dtype)
        parts = shard_parameter(rule, 0, 1).parts
        self._targets.append(Target(rule.mcore_name, region, parts))
        stored = self._tensors.setdefault(
            entry.key,
            TensorStorageMetadata(
                TensorProperties(dtype=self._dtype),
                torch.Size((*lead[entry.key], *rule.mcore_shape)),
                [],
            ),
        )
        offsets = torch.Size((*entry.lead, *(0 for _ in rule.mcore_shape)))
        index = MetadataIndex(entry.key, offsets, len(stored.chunks))
        stored.chunks.append(ChunkStorageMetadata(offsets, torch.Size(shape)))
        self._storage[index] = _StorageInfo(_file_name(file), start, num_bytes)

    def add_object(self, key: str) -> None:
        """An object without content."""
        file, start = self._reserve(len(self._empty))
        self._files[file].append((start, self._empty))
        self._objects[key] = BytesStorageMetadata()
        info = _StorageInfo(_file_name(file), start, len(self._empty))
        self._storage[MetadataIndex(key)] = info

    def finish(self) -> FileLayout:
        files = tuple(
            PlannedFile(_file_name(index), end, tuple(constants))
            for index, (end, constants) in enumerate(zip(self._ends, self._files, strict=True))
        )
        metadata = Metadata({**self._tensors, **self._objects}, storage_data=self._storage)
        small = {
            COMMON_NAME: _saved({}),
            FORMAT_NAME: json.dumps(TORCH_DIST_FORMAT).encode(),
            METADATA_NAME: pickle.dumps(metadata),
            RECORD_NAME: b"{}\n",
        }
        return FileLayout(files, tuple(self._targets), small)


def _file_name(index: int) -> str:
    return f"__0_{index}.distcp"


def _saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@cache
def _around(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """What torch.save puts before and behind the data of a contiguous tensor; the same for all of
    this shape and dtype. It writes a temporary file with a hole in place of the data.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-opsft-") as scratch:
        path = Path(scratch) / "archive"  # its name is part of the archive
        with torch.serialization.skip_data():
            torch.save(torch.empty(shape, dtype=dtype), path)  # never touched: it takes no memory
        data = archived_tensor(path, 0, path.stat().st_size, str(path))
        with open(path, "rb") as file:
            before = file.read(data.offset)
            file.seek(data.offset + data.num_bytes)
            return before, file.read()
