"""The `.metadata` file of torch's distributed checkpoints, which says what is stored where.

It is a pickle. Only the classes that torch puts into it are loaded, so a damaged or hostile file is
an error and can do no harm. Classes are listed one by one: a pickle may name whatever a module
imports.
"""

import io
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron_opsft.errors import UserError, first_line
from megatron_opsft.models.storage.large_files import Region, archived_tensor
from megatron_opsft.models.storage.model_paths import METADATA_NAME
from megatron_opsft.records import TensorShape

_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},  # torch's own `save` notes where it wrote
    "pathlib._local": {"PosixPath"},  # the same from Python 3.13 on
    "collections": {"OrderedDict"},
    "builtins": {"set", "dict", "list"},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        value = getattr(torch, name, None) if module == "torch" else None
        if name in _CLASSES.get(module, ()) or isinstance(value, torch.dtype):
            return super().find_class(module.removesuffix("._local"), name)
        raise pickle.UnpicklingError(
            f"{module}.{name} is not allowed in a checkpoint's metadata"
        )


class Chunk(NamedTuple):
    """A rectangle of the tensor `key` that is stored in one piece."""

    key: str
    dtype: torch.dtype
    offsets: tuple[int, ...]
    """Where the chunk begins in the tensor, on each axis."""
    sizes: TensorShape
    path: Path
    file_offset: int
    """Where its bytes, an archive of `torch.save`, begin in the file."""
    length: int
    """Bytes of the archive."""


class StoredTensor(NamedTuple):
    """A tensor of the checkpoint."""

    shape: TensorShape
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]
    """They cover the tensor exactly once."""


def read_metadata(directory: Path) -> dict[str, StoredTensor]:
    """Read key -> tensor; objects other than tensors are left out.

    Errors: `UserError`, naming the file and the tensor, for metadata that cannot be read, or chunks
    that do not cover their tensor.
    """
    metadata = unpickle_metadata(directory)
    with damage_named(directory / METADATA_NAME):
        return {
            key: _stored_tensor(directory, key, entry, metadata.storage_data)
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }


def unpickle_metadata(directory: Path) -> Metadata:
    """Unpickle a checkpoint's metadata; only `_CLASSES` and dtypes are loaded.

    Errors: `UserError` naming the file.
    """
    path = directory / METADATA_NAME
    with damage_named(path):
        metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}")
    return metadata


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Turn every error of the block into a `UserError` that calls the file damaged."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        reason = first_line(error)[:200]
        # torch goes on with advice to load it all the same.
        if "Weights only" in reason:
            reason = "it holds more than tensors and plain values"
        raise UserError(f"{path} is damaged: {reason}") from None


def _stored_tensor(
    directory: Path,
    key: str,
    entry: TensorStorageMetadata,
    storage: Mapping[MetadataIndex, Any],
) -> StoredTensor:
    """Describe a tensor and where its chunks are stored.

    entry, storage: torch's description of the tensor, and of where chunks lie in files. Errors:
    `UserError` for chunks that do not cover the tensor.
    """
    shape, dtype = tuple(map(int, entry.size)), entry.properties.dtype
    chunks = []
    for chunk in entry.chunks:
        offsets, sizes = tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes))
        info = storage[MetadataIndex(key, offsets)]
        path = directory / Path(info.relative_path).name
        chunks.append(
            Chunk(
                key,
                dtype,
                offsets,
                sizes,
                path,
                int(info.offset),
                int(info.length),
            )
        )
    # As many elements as the tensor has, all inside it: overlaps would leave a hole elsewhere.
    is_covered = (
        all(_lies_in(shape, chunk) for chunk in chunks)
        and len({chunk.offsets for chunk in chunks}) == len(chunks)
        and sum(prod(chunk.sizes) for chunk in chunks) == prod(shape)
    )
    if not is_covered:
        raise UserError(
            f"{directory / METADATA_NAME}: the stored parts of tensor {key} do not make up its "
            f"shape {list(shape)}"
        )
    return StoredTensor(shape, dtype, tuple(chunks))


def _lies_in(shape: TensorShape, chunk: Chunk) -> bool:
    """True if no element of the chunk is outside the tensor."""
    if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
        return False
    axes = zip(chunk.offsets, chunk.sizes, shape, strict=True)
    return all(0 <= offset <= size - length for offset, length, size in axes)


def locate(chunk: Chunk) -> Region:
    """Return the bytes of a chunk's elements, inside its archive.

    Errors: `UserError` if the archive is damaged or holds another shape or dtype.
    """
    what = f"{chunk.path}: tensor {chunk.key} at {list(chunk.offsets)}"
    region = archived_tensor(chunk.path, chunk.file_offset, chunk.length, what)
    if (region.shape, region.dtype) != (chunk.sizes, chunk.dtype):
        raise UserError(
            f"{what} holds {region.dtype} {list(region.shape)}, but {METADATA_NAME} says "
            f"{chunk.dtype} {list(chunk.sizes)}"
        )
    return region
