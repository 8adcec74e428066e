"""The files of a Megatron checkpoint of format torch_dist: archives of torch, one after another."""

import io
import json
import pickle
import tempfile
from collections.abc import Mapping, Sequence
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

from megatron_opsft.errors import UserError
from megatron_opsft.models.storage.carried import plan_carried
from megatron_opsft.models.storage.hf_writer import FileLayout, Target
from megatron_opsft.models.storage.large_files import PAGE, Region, archived_tensor
from megatron_opsft.models.storage.model_paths import (
    COMMON_NAME,
    FORMAT_NAME,
    METADATA_NAME,
    RECORD_NAME,
    STACKS_EXPERTS,
    TORCH_DIST_FORMAT,
)
from megatron_opsft.models.storage.partial import PlannedFile
from megatron_opsft.models.weights.checkpoint_keys import (
    StoredPart,
    entry_of,
    extra_state_keys,
    lead_sizes,
    parts_in,
)
from megatron_opsft.models.weights.rectangles import Copy, whole
from megatron_opsft.models.weights.rules import WeightRule, WeightTable
from megatron_opsft.models.weights.slicing import shard_parameter
from megatron_opsft.records import JsonObject, TensorShape
from megatron_opsft.runtime.rounding import round_up

_SMALL_ALIGNMENT = 64  # torch's archives align their tensors to as many bytes


def megatron_layout(
    table: WeightTable,
    dtypes: Mapping[str, torch.dtype],
    carried: Mapping[str, Region],
    max_file_bytes: int,
    *,
    stack_experts: bool = False,
) -> FileLayout:
    """Lay out a Megatron checkpoint of format torch_dist.

    table: with TransformerEngine's names. dtypes: of each HF tensor. carried: tensors of other
    parts of the model. max_file_bytes: the most that a file may have. stack_experts: whether the
    model's HF files stack the experts, which the checkpoint records for the way back. Errors:
    `UserError` if HF tensors that go into one Megatron tensor differ in dtype.
    """
    layout = _DistLayout(max_file_bytes)
    sizes = lead_sizes(table)
    for rule in table.exported:
        for part in parts_in(entry_of(rule), rule):
            layout.add_chunk(rule, part, sizes[entry_of(rule).key], dtypes)
    empty = _saved([None])
    for key in extra_state_keys(table):
        layout.described[key] = BytesStorageMetadata()
        layout.add_archive(MetadataIndex(key), empty)
    metadata = Metadata(layout.described, storage_data=layout.storage)
    record: JsonObject = {"vocab_size": table.shape.vocab_size}
    if table.num_experts:
        record[STACKS_EXPERTS] = stack_experts
    small_files = {
        COMMON_NAME: _saved({}),
        FORMAT_NAME: json.dumps(TORCH_DIST_FORMAT).encode(),
        METADATA_NAME: pickle.dumps(metadata),
        RECORD_NAME: json.dumps(record).encode(),
    }
    files = [
        PlannedFile(_file_name(index), file.num_bytes, tuple(file.constants))
        for index, file in enumerate(layout.files)
    ]
    targets = list(layout.targets)
    if carried:
        file_of_carried, targets_in_file = plan_carried(carried)
        files.append(file_of_carried)
        targets += targets_in_file
    return FileLayout(tuple(files), tuple(targets), small_files)


@dataclass
class _File:
    """A file of archives that is being laid out."""

    num_bytes: int = 0
    constants: list[tuple[int, bytes]] = field(default_factory=list)
    """(offset, bytes) of everything that is not tensor data."""


@dataclass
class _DistLayout:
    """Files of archives, and Megatron's metadata of them."""

    max_file_bytes: int
    files: list[_File] = field(default_factory=list)
    """Archives are added to the last one."""
    targets: list[Target] = field(default_factory=list)
    described: dict[str, Any] = field(default_factory=dict)
    """Key -> metadata of a tensor or an object."""
    storage: dict[MetadataIndex, _StorageInfo] = field(default_factory=dict)
    """Chunk of a tensor, or object -> its archive."""

    def add_archive(
        self,
        index: MetadataIndex,
        before: bytes,
        data_bytes: int = 0,
        after: bytes = b"",
    ) -> tuple[Path, int]:
        """Add an archive: `data_bytes` of tensor data between bytes that are known.

        Returns the file and the offset of the data.
        """
        num_bytes = len(before) + data_bytes + len(after)
        if not self.files or self.files[-1].num_bytes + num_bytes > self.max_file_bytes:
            self.files.append(_File())
        file = self.files[-1]
        data_start = file.num_bytes + len(before)
        if data_bytes >= PAGE:  # disks read and write whole pages fastest
            data_start = round_up(data_start, PAGE)
        elif data_bytes:  # pages would waste too much for small tensors
            data_start = round_up(data_start, _SMALL_ALIGNMENT)
        start = data_start - len(before)
        file.num_bytes = start + num_bytes
        file.constants.append((start, before))
        if after:
            file.constants.append((data_start + data_bytes, after))
        name = _file_name(len(self.files) - 1)
        self.storage[index] = _StorageInfo(name, start, num_bytes)
        return Path(name), data_start

    def add_chunk(
        self,
        rule: WeightRule,
        part: StoredPart,
        lead_sizes: TensorShape,
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        """Add the part of one layer (or expert) to a Megatron tensor that holds all layers: a chunk
        of size 1 on each of its leading axes.

        lead_sizes: numbers of layers (and experts). dtypes: of each HF tensor. Errors: `UserError`
        if the HF tensors that go into this Megatron tensor differ in dtype.
        """
        copies = _copies_to(rule, part)
        dtype = _only_dtype(copies, part, dtypes)
        entry = part.entry
        part_shape = (part.num_rows, *rule.mcore_shape[1:])
        shape = (1,) * len(entry.lead) + part_shape
        whole_shape = torch.Size(lead_sizes + part_shape)
        offsets = torch.Size(entry.lead + (0,) * len(part_shape))
        properties = TensorProperties(dtype=dtype)
        new_metadata = TensorStorageMetadata(properties, whole_shape, [])
        # All chunks of a tensor share the metadata of the first.
        metadata = self.described.setdefault(entry.key, new_metadata)
        if metadata.properties.dtype is not dtype:
            raise UserError(
                f"tensor {copies[0].source.tensor} is {dtype}, but other layers have "
                f"{metadata.properties.dtype} in {entry.key}; give --dtype to convert all to one"
            )
        index = MetadataIndex(entry.key, offsets, len(metadata.chunks))
        metadata.chunks.append(ChunkStorageMetadata(offsets, torch.Size(shape)))
        before, after = _archive_frame(shape, dtype)
        data_bytes = prod(shape) * dtype.itemsize
        file, offset = self.add_archive(index, before, data_bytes, after)
        region = Region(file, offset, part_shape, dtype)
        self.targets.append(Target(rule.mcore_name, region, copies))


def _copies_to(rule: WeightRule, part: StoredPart) -> tuple[Copy, ...]:
    """Return the copies from HF tensors to a part of a parameter, counted from its first row."""
    part_shape = (part.num_rows, *rule.mcore_shape[1:])
    stored = whole(rule.mcore_name, part_shape).shift(part.first_row, 0)
    copies = []
    for whole_copy in shard_parameter(rule, 0, 1).copies:
        copy = whole_copy.cut_target(stored)
        if copy is not None:
            copies.append(copy._replace(target=copy.target.relative_to(stored)))
    return tuple(copies)


def _only_dtype(
    copies: Sequence[Copy], part: StoredPart, dtypes: Mapping[str, torch.dtype]
) -> torch.dtype:
    names = list(dict.fromkeys(copy.source.tensor for copy in copies))
    for name in names:
        if dtypes[name] is not dtypes[names[0]]:
            raise UserError(
                f"tensor {name} is {dtypes[name]}, but {names[0]} is {dtypes[names[0]]}, and both "
                f"are in {part.entry.key}; give --dtype to convert all to one"
            )
    return dtypes[names[0]]


def _file_name(index: int) -> str:
    return f"__0_{index}.distcp"


def _saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@cache
def _archive_frame(shape: TensorShape, dtype: torch.dtype) -> tuple[bytes, bytes]:
    """Return what torch.save writes before and after any contiguous tensor of this shape.

    It is read from a temporary file with a hole in place of the data.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-opsft-") as scratch:
        path = Path(scratch) / "archive"  # its name is part of the archive
        with torch.serialization.skip_data():
            # Nothing touches the empty tensor, so it takes no memory.
            torch.save(torch.empty(shape, dtype=dtype), path)
        data = archived_tensor(path, 0, path.stat().st_size, str(path))
        with open(path, "rb") as file:
            before = file.read(data.offset)
            file.seek(data.offset + data.num_bytes)
            return before, file.read()
