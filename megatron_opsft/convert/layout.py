"""Every byte of an output has its place before the first one is written.

So tensors can be written in any order and by several threads, nothing is held back in memory, and
an interrupted conversion that is repeated writes the same bytes to the same places.
"""

import io
import json
import pickle
from dataclasses import dataclass
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

from megatron_opsft.architectures.template import ShardKind
from megatron_opsft.convert.archive import Archive, archive_of
from megatron_opsft.storage.direct_io import ALIGNMENT
from megatron_opsft.storage.dist_metadata import METADATA_NAME
from megatron_opsft.storage.hf_files import INDEX_NAME
from megatron_opsft.storage.hf_writer import index_of, plan_shards
from megatron_opsft.weights.checkpoint_keys import (
    Place,
    exported_rules,
    extra_state_keys,
    lead_sizes,
    place_of,
)
from megatron_opsft.weights.rules import Rule, WeightTable
from megatron_opsft.weights.slicing import shard_blocks

_SMALL_ALIGNMENT = 64  # as torch's archives align their tensors

# Megatron's own record of the format of a checkpoint.
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True, slots=True)
class CopyStep:
    """Rows [start, stop) of an HF tensor, which are the target's rows from `row` on."""

    hf_name: str
    start: int
    stop: int
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A tensor of the output: `offset` bytes into a file.

    The steps fill its rows in order from the first on; rows behind them stay zero.
    """

    name: str
    file_name: str
    offset: int
    row_shape: tuple[int, ...]
    row_bytes: int
    num_bytes: int
    steps: tuple[CopyStep, ...]

    @property
    def num_filled(self) -> int:
        """How many rows the steps fill."""
        return self.steps[-1].row + self.steps[-1].stop - self.steps[-1].start

    def offset_of(self, row: int) -> int:
        """Where a row begins in the file."""
        return self.offset + row * self.row_bytes


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A large file: its size and the bytes between the tensors, as (offset, bytes)."""

    name: str
    num_bytes: int
    constants: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """All of an output but what comes along from the source directory."""

    files: tuple[PlannedFile, ...]
    targets: tuple[Target, ...]
    small_files: dict[str, bytes]

    @property
    def num_bytes(self) -> int:
        """Of the tensors, padding included."""
        return sum(target.num_bytes for target in self.targets)


def plan_hf(table: WeightTable, dtype: torch.dtype, max_shard_bytes: int) -> OutputPlan:
    """A Hugging Face directory: safetensors shards and their index."""
    shapes = table.hf_shapes()
    shards = plan_shards(shapes, dtype, max_shard_bytes)
    files = [PlannedFile(s.file_name, s.num_bytes, ((0, s.header),)) for s in shards]
    targets = []
    for shard in shards:
        for name, offset in shard.offsets.items():
            rows, *row_shape = shapes[name]
            row_bytes = prod(row_shape) * dtype.itemsize
            targets.append(
                Target(
                    name=name,
                    file_name=shard.file_name,
                    offset=offset,
                    row_shape=tuple(row_shape),
                    row_bytes=row_bytes,
                    num_bytes=rows * row_bytes,
                    steps=(CopyStep(name, 0, rows, 0),),
                )
            )
    small: dict[str, bytes] = {}
    if len(shards) > 1:
        small[INDEX_NAME] = index_of(shards)
    return OutputPlan(tuple(files), tuple(targets), small)


def plan_megatron(
    table: WeightTable, dtype: torch.dtype, max_file_bytes: int, scratch: Path
) -> OutputPlan:
    """A Megatron checkpoint of format torch_dist.

    table: with TransformerEngine's names; scratch: an existing directory for temporary files.
    """
    layout = _DistLayout(dtype, max_file_bytes, scratch)
    sizes = lead_sizes(table)
    for rule in exported_rules(table):
        layout.add_tensor(rule, place_of(rule.mcore_name), sizes)
    for key in extra_state_keys(table):
        layout.add_object(key)
    return layout.plan()


class _DistLayout:
    """Lays archives one behind the other into files, and keeps Megatron's metadata of them."""

    def __init__(self, dtype: torch.dtype, max_file_bytes: int, scratch: Path) -> None:
        self._dtype, self._max_file_bytes, self._scratch = dtype, max_file_bytes, scratch
        self._files: list[list[tuple[int, bytes]]] = [[]]
        self._ends = [0]
        self._targets: list[Target] = []
        self._metadata = Metadata(state_dict_metadata={}, planner_data=None, storage_data={})
        self._archives: dict[tuple[int, ...], Archive] = {}
        self._empty = _saved([None])

    def _reserve(
        self, num_bytes: int, header_bytes: int = 0, alignment: int = 1
    ) -> tuple[int, int]:
        """(number of the file, offset) of the next `num_bytes`.

        What comes behind their first `header_bytes` is aligned.
        """
        if self._ends[-1] and self._ends[-1] + num_bytes > self._max_file_bytes:
            self._files.append([])
            self._ends.append(0)
        start = self._ends[-1]
        start += -(start + header_bytes) % alignment
        self._ends[-1] = start + num_bytes
        return len(self._files) - 1, start

    def _store(self, index: MetadataIndex, file: int, start: int, num_bytes: int) -> None:
        assert isinstance(self._metadata.storage_data, dict)
        self._metadata.storage_data[index] = _StorageInfo(_file_name(file), start, num_bytes)

    def add_tensor(self, rule: Rule, place: Place, lead: dict[str, tuple[int, ...]]) -> None:
        """One layer (or expert) of a tensor: a chunk with one index on each prepended axis."""
        shape = (*(1 for _ in place.lead), *rule.mcore_shape)
        if shape not in self._archives:
            self._archives[shape] = archive_of(shape, self._dtype, self._scratch)
        archive = self._archives[shape]
        # Whole pages are what disks read and write fastest; small tensors would waste most of one.
        alignment = ALIGNMENT if archive.data_bytes >= ALIGNMENT else _SMALL_ALIGNMENT
        file, start = self._reserve(archive.num_bytes, len(archive.before), alignment)
        data = start + len(archive.before)
        self._files[file] += [(start, archive.before), (data + archive.data_bytes, archive.behind)]
        row_shape = rule.mcore_shape[1:]
        self._targets.append(
            Target(
                name=rule.mcore_name,
                file_name=_file_name(file),
                offset=data,
                row_shape=row_shape,
                row_bytes=prod(row_shape) * self._dtype.itemsize,
                num_bytes=archive.data_bytes,
                steps=_row_steps(rule),
            )
        )
        entry = self._metadata.state_dict_metadata.setdefault(
            place.key,
            TensorStorageMetadata(
                TensorProperties(dtype=self._dtype),
                torch.Size((*lead[place.key], *rule.mcore_shape)),
                [],
            ),
        )
        assert isinstance(entry, TensorStorageMetadata)
        offsets = torch.Size((*place.lead, *(0 for _ in rule.mcore_shape)))
        index = MetadataIndex(place.key, offsets, len(entry.chunks))
        entry.chunks.append(ChunkStorageMetadata(offsets, torch.Size(shape)))
        self._store(index, file, start, archive.num_bytes)

    def add_object(self, key: str) -> None:
        """An object without content."""
        file, start = self._reserve(len(self._empty))
        self._files[file].append((start, self._empty))
        self._metadata.state_dict_metadata[key] = BytesStorageMetadata()
        self._store(MetadataIndex(key), file, start, len(self._empty))

    def plan(self) -> OutputPlan:
        files = tuple(
            PlannedFile(_file_name(number), end, tuple(constants))
            for number, (end, constants) in enumerate(zip(self._ends, self._files, strict=True))
        )
        small = {
            "common.pt": _saved({}),
            "metadata.json": json.dumps(_FORMAT).encode(),
            METADATA_NAME: pickle.dumps(self._metadata),
        }
        return OutputPlan(files, tuple(self._targets), small)


def _row_steps(rule: Rule) -> tuple[CopyStep, ...]:
    """The rows of a whole Megatron parameter: without tensor parallelism nothing cuts columns."""
    if rule.kind in (ShardKind.COPY, ShardKind.ROW):
        return (CopyStep(rule.hf_names[0], 0, rule.hf_shapes[0][0], 0),)
    return tuple(
        CopyStep(block.hf_name, block.hf_start, block.hf_stop, block.shard_start)
        for block in shard_blocks(rule, 0, 1)
    )


def _file_name(number: int) -> str:
    return f"__0_{number}.distcp"


def _saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
