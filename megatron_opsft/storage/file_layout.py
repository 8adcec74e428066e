"""Every byte of an output directory has its place before the first one is written.

So tensors can be written in any order and by several threads, and nothing is held back in memory
(safetensors' own writer needs a whole shard at once).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from megatron_opsft.storage.hf_files import SAFETENSORS_DTYPES
from megatron_opsft.storage.known_files import INDEX_NAME, SINGLE_NAME
from megatron_opsft.storage.regions import Region
from megatron_opsft.weights.rectangles import Copy, whole


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the output.

    region: its place; the path is relative to the directory. parts: copies from HF tensors that
    fill its rows in order from the first on; rows behind them stay zero.
    """

    name: str
    region: Region
    parts: tuple[Copy, ...]

    @property
    def num_filled(self) -> int:
        """How many rows the parts fill."""
        return self.parts[-1].target.row1


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A large file: its size and the bytes between the tensors, as (offset, bytes)."""

    name: str
    num_bytes: int
    constants: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True, slots=True)
class FileLayout:
    """All of an output but what comes along from the source directory."""

    files: tuple[PlannedFile, ...]
    targets: tuple[Target, ...]
    small_files: dict[str, bytes]

    @property
    def num_bytes(self) -> int:
        """Size of the tensors, padding included."""
        return sum(target.region.num_bytes for target in self.targets)


def hf_layout(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, max_shard_bytes: int
) -> FileLayout:
    """A Hugging Face directory: safetensors shards of at most `max_shard_bytes`, and their index.

    Tensors keep the given order; a larger one gets a file of its own. Names follow the hub's
    convention. dtype: one of SAFETENSORS_DTYPES.
    """
    groups: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = prod(shape) * dtype.itemsize
        if groups[-1] and filled + size > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    count = len(groups)
    file_names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    if count == 1:
        file_names = [SINGLE_NAME]
    files: list[PlannedFile] = []
    targets: list[Target] = []
    for file_name, names in zip(file_names, groups, strict=True):
        header, offsets, num_bytes = _safetensors(names, shapes, dtype)
        files.append(PlannedFile(file_name, num_bytes, ((0, header),)))
        for name, offset in offsets.items():
            rect = whole(name, shapes[name])
            region = Region(Path(file_name), offset, tuple(shapes[name]), dtype)
            targets.append(Target(name, region, (Copy(rect, rect),)))
    layout = FileLayout(tuple(files), tuple(targets), {})
    if count > 1:
        weight_map = {target.name: str(target.region.path) for target in targets}
        index = {"metadata": {"total_size": layout.num_bytes}, "weight_map": weight_map}
        layout.small_files[INDEX_NAME] = (json.dumps(index, indent=2) + "\n").encode()
    return layout


def _safetensors(
    names: list[str], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> tuple[bytes, dict[str, int], int]:
    """(header, offset of each tensor, size of the file): u64 header length, JSON padded to 8 bytes,
    data without gaps.
    """
    dtype_name = {value: key for key, value in SAFETENSORS_DTYPES.items()}[dtype]
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    position = 0
    for name in names:
        stop = position + prod(shapes[name]) * dtype.itemsize
        starts[name] = position
        entries[name] = {
            "dtype": dtype_name,
            "shape": list(shapes[name]),
            "data_offsets": [position, stop],
        }
        position = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {n: s + len(header) for n, s in starts.items()}, position + len(header)
