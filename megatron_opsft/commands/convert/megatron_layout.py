"""The files of a Megatron checkpoint of format torch_dist: archives one behind the other."""

import io
import json
import pickle
import tempfile
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

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

from megatron_opsft.models.storage.hf_writer import FileLayout, Target
from megatron_opsft.models.storage.large_files import PAGE
from megatron_opsft.models.storage.model_paths import (
    COMMON_NAME,
    FORMAT_NAME,
    METADATA_NAME,
    RECORD_NAME,
    TORCH_DIST_FORMAT,
)
from megatron_opsft.models.storage.partial import PlannedFile
from megatron_opsft.models.storage.regions import Region, archived_tensor
from megatron_opsft.models.weights.checkpoint_keys import (
    Entry,
    entry_of,
    extra_state_keys,
    lead_sizes,
)
from megatron_opsft.models.weights.rules import WeightRule, WeightTable
from megatron_opsft.models.weights.slicing import shard_parameter

_SMALL_ALIGNMENT = 64  # as torch's archives align their tensors


def megatron_layout(
    table: WeightTable, dtype: torch.dtype, max_file_bytes: int
) -> FileLayout:
    """A Megatron checkpoint of format torch_dist; table: with TransformerEngine's names."""
    layout = _DistLayout(dtype, max_file_bytes)
    sizes = lead_sizes(table)
    for rule in table.exported:
        layout.add_tensor(rule, entry_of(rule.mcore_name), sizes)
    empty = _saved([None])
    for key in extra_state_keys(table):
        layout.described[key] = BytesStorageMetadata()
        layout.add(MetadataIndex(key), empty)
    ends, files = layout.ends, layout.files
    metadata = Metadata(layout.described, storage_data=layout.storage)
    return FileLayout(
        tuple(
            PlannedFile(_file_name(n), end, tuple(files[n]))
            for n, end in enumerate(ends)
        ),
        tuple(layout.targets),
        {
            COMMON_NAME: _saved({}),
            FORMAT_NAME: json.dumps(TORCH_DIST_FORMAT).encode(),
            METADATA_NAME: pickle.dumps(metadata),
            RECORD_NAME: json.dumps({"vocab_size": table.shape.vocab_size}).encode(),
        },
    )


@dataclass
class _DistLayout:
    """Archives one behind the other in files, and Megatron's metadata of them.

    files: of each what is not tensor data, as (offset, bytes); ends: their sizes.
    """

    dtype: torch.dtype
    max_file_bytes: int
    files: list[list[tuple[int, bytes]]] = field(default_factory=lambda: [[]])
    ends: list[int] = field(default_factory=lambda: [0])
    targets: list[Target] = field(default_factory=list)
    described: dict[str, Any] = field(default_factory=dict)
    storage: dict[MetadataIndex, _StorageInfo] = field(default_factory=dict)

    def add(
        self,
        index: MetadataIndex,
        before: bytes,
        data_bytes: int = 0,
        behind: bytes = b"",
    ) -> tuple[Path, int]:
        """An archive of data between bytes that are known: the file, and where its data is."""
        num_bytes = len(before) + data_bytes + len(behind)
        if self.ends[-1] and self.ends[-1] + num_bytes > self.max_file_bytes:
            self.files.append([])
            self.ends.append(0)
        data = self.ends[-1] + len(before)
        if data_bytes:
            # Whole pages are what disks read and write fastest; small tensors would waste most.
            data += -data % (PAGE if data_bytes >= PAGE else _SMALL_ALIGNMENT)
        start = data - len(before)
        self.ends[-1] = start + num_bytes
        self.files[-1] += [(start, before), (data + data_bytes, behind)][
            : 1 + bool(behind)
        ]
        name = _file_name(len(self.files) - 1)
        self.storage[index] = _StorageInfo(name, start, num_bytes)
        return Path(name), data

    def add_tensor(
        self, rule: WeightRule, entry: Entry, lead: dict[str, tuple[int, ...]]
    ) -> None:
        """One layer (or expert) of a tensor: a chunk with one index on each prepended axis."""
        shape = (*(1 for _ in entry.lead), *rule.mcore_shape)
        before, behind = _around(shape, self.dtype)
        whole = torch.Size((*lead[entry.key], *rule.mcore_shape))
        properties = TensorProperties(dtype=self.dtype)
        stored = TensorStorageMetadata(properties, whole, [])
        stored = self.described.setdefault(entry.key, stored)
        offsets = torch.Size((*entry.lead, *(0 for _ in rule.mcore_shape)))
        index = MetadataIndex(entry.key, offsets, len(stored.chunks))
        stored.chunks.append(ChunkStorageMetadata(offsets, torch.Size(shape)))
        path, data = self.add(index, before, prod(shape) * self.dtype.itemsize, behind)
        region = Region(path, data, rule.mcore_shape, self.dtype)
        self.targets.append(
            Target(rule.mcore_name, region, shard_parameter(rule, 0, 1).copies)
        )


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
            torch.save(
                torch.empty(shape, dtype=dtype), path
            )  # never touched: it takes no memory
        data = archived_tensor(path, 0, path.stat().st_size, str(path))
        with open(path, "rb") as file:
            before = file.read(data.offset)
            file.seek(data.offset + data.num_bytes)
            return before, file.read()
