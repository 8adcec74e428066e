"""The `.metadata` of a distributed checkpoint, made by all its ranks: each pickles the entries of
what it wrote, and one puts the pickles behind each other.

torch's planner makes Python objects of all ranks' entries on one rank, which takes seconds in a
large job. Pickles without references can be joined as bytes: the file here is one pickle of torch's
`Metadata`, as its planner would make it.
"""

import io
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

_HERE: Any = "entries of all ranks"  # where they come in a template
# Named once in the file: entries refer to them by number.
_CLASSES = (ChunkStorageMetadata, MetadataIndex, _StorageInfo, torch.Size)


@dataclass(slots=True)
class _Tensor:
    """template: pickle of its entry around its chunks; chunks: pickles, one behind the other."""

    size: tuple[int, ...]
    template: tuple[bytes, bytes]
    num_elements: int = 0
    chunks: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class MetadataPart:
    """Of one rank, or of several: tensors by key, and pickled pairs of the other entries."""

    tensors: dict[str, _Tensor] = field(default_factory=dict)
    objects: list[bytes] = field(default_factory=list)
    storage: list[bytes] = field(default_factory=list)

    def add(self, other: "MetadataPart") -> None:
        """Take in what another rank wrote."""
        for key, theirs in other.tensors.items():
            mine = self.tensors.setdefault(key, _Tensor(theirs.size, theirs.template))
            mine.num_elements += theirs.num_elements
            mine.chunks += theirs.chunks
        self.objects += other.objects
        self.storage += other.storage

    def missing(self) -> list[str]:
        """Keys of tensors of which not every element was written once."""
        return [key for key, t in self.tensors.items() if t.num_elements != prod(t.size)]


def metadata_part(items: Iterable[WriteItem], results: Iterable[WriteResult]) -> MetadataPart:
    """What a rank planned and wrote."""
    part = MetadataPart()
    chunks: dict[str, list[ChunkStorageMetadata]] = {}
    for item in items:
        key, data = item.index.fqn, item.tensor_data
        if data is None:
            part.objects.append(_pickled(key) + _pickled(BytesStorageMetadata()))
            continue
        if key not in part.tensors:
            entry = TensorStorageMetadata(properties=data.properties, size=data.size, chunks=_HERE)
            part.tensors[key] = _Tensor(tuple(data.size), _template(entry))
        part.tensors[key].num_elements += prod(data.chunk.sizes)
        chunks.setdefault(key, []).append(data.chunk)
    for key, own in chunks.items():
        part.tensors[key].chunks = [b"".join(map(_pickled, own))]
    pairs = [_pickled(result.index) + _pickled(result.storage_data) for result in results]
    part.storage = [b"".join(pairs)]
    return part


def write_metadata(part: MetadataPart, path: Path) -> None:
    """part: of all ranks. Errors: OSError."""
    with open(path, "wb") as file:
        file.writelines(_file(part, str(path.parent)))


def _file(part: MetadataPart, directory: str) -> Iterator[bytes]:
    yield pickle.PROTO + bytes([2])
    for number, name in enumerate(_NAMES):
        yield name + pickle.BINPUT + bytes([number]) + pickle.POP
    around = Metadata(
        state_dict_metadata=_HERE,
        storage_data=_HERE,
        storage_meta=StorageMeta(checkpoint_id=directory),
        version=CURRENT_DCP_VERSION,
    )
    head, between, tail = _pickled(around).split(_pickled(_HERE))
    yield head + pickle.EMPTY_DICT + pickle.MARK
    for key, tensor in part.tensors.items():
        yield _pickled(key) + tensor.template[0] + pickle.EMPTY_LIST + pickle.MARK
        yield from tensor.chunks
        yield pickle.APPENDS + tensor.template[1]
    yield from part.objects
    yield pickle.SETITEMS + between + pickle.EMPTY_DICT + pickle.MARK
    yield from part.storage
    yield pickle.SETITEMS + tail + pickle.STOP


def _template(entry: object) -> tuple[bytes, bytes]:
    before, after = _pickled(entry).split(_pickled(_HERE))
    return before, after


def _pickled(value: object) -> bytes:
    """Instructions that leave `value` on the unpickler's stack, without references to others."""
    opcodes = _plainly(value)
    for number, name in enumerate(_NAMES):
        opcodes = opcodes.replace(name, pickle.BINGET + bytes([number]))
    return opcodes


def _plainly(value: object) -> bytes:
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=2)
    pickler.fast = True
    pickler.dump(value)
    return file.getvalue()[2:-1]  # without PROTO and STOP


_NAMES: Sequence[bytes] = [_plainly(each) for each in _CLASSES]
