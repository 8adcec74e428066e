"""Writing a Hugging Face model directory: in any order, and visible only when complete.

The shards are laid out from names, shapes and dtype before the first byte, so each tensor has its
place in its file and nothing is held back in memory (safetensors' own writer needs a whole shard at
once).
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from megatron_opsft.errors import UserError
from megatron_opsft.runtime.durable import sync_path, write_at, write_bytes
from megatron_opsft.storage.hf_files import INDEX_NAME, NAMED_WEIGHTS, SINGLE_NAME
from megatron_opsft.storage.hf_shards import SAFETENSORS_DTYPES
from megatron_opsft.storage.partial import PartialDir
from megatron_opsft.storage.regions import check_cast
from megatron_opsft.storage.replacing import check_out

MAX_SHARD_BYTES = 5_000_000_000
COPIED_PATTERNS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.tiktoken",
    "tekken.json",
    "*.model",
    "chat_template*",
    "additional_chat_templates",
    "custom_generate",
)


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One planned safetensors file: header (with its length prefix) and byte offset per tensor."""

    file_name: str
    header: bytes
    offsets: dict[str, int]
    num_bytes: int


def plan_shards(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, max_shard_bytes: int
) -> tuple[ShardFile, ...]:
    """Tensors in the given order into files of at most `max_shard_bytes` of data.

    A larger tensor gets a file of its own. Names follow the hub's convention. Depends on nothing
    else, so an interrupted and repeated write puts every byte at the same place.
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
    if len(groups) == 1:
        return (_plan_file(SINGLE_NAME, groups[0], shapes, dtype),)
    return tuple(
        _plan_file(f"model-{i:05d}-of-{len(groups):05d}.safetensors", names, shapes, dtype)
        for i, names in enumerate(groups, start=1)
    )


def _plan_file(
    file_name: str, names: list[str], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> ShardFile:
    """The safetensors layout: u64 header length, JSON padded to 8 bytes, data without gaps."""
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
    offsets = {name: start + len(header) for name, start in starts.items()}
    return ShardFile(file_name, header, offsets, position + len(header))


def index_of(shards: Sequence[ShardFile]) -> bytes:
    """The content of the index that several shards need."""
    data_bytes = sum(shard.num_bytes - len(shard.header) for shard in shards)
    weight_map = {name: shard.file_name for shard in shards for name in shard.offsets}
    index = {"metadata": {"total_size": data_bytes}, "weight_map": weight_map}
    return (json.dumps(index, indent=2) + "\n").encode()


def side_files(model_dir: Path, dtype: torch.dtype | None) -> dict[str, bytes]:
    """Config, generation config, tokenizer, chat template: relative name -> content.

    dtype: what config.json should say; None leaves it as it is.
    """
    files = {
        str(path.relative_to(model_dir)): path.read_bytes()
        for found in {p for pattern in COPIED_PATTERNS for p in model_dir.glob(pattern)}
        for path in (found.rglob("*") if found.is_dir() else [found])
        if path.is_file()
    }
    content = (model_dir / "config.json").read_bytes()
    if dtype is not None:
        config = json.loads(content)
        config.pop(NAMED_WEIGHTS, None)  # a file of the source, not one of the result
        for key in [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]:
            config[key] = str(dtype).removeprefix("torch.")
        content = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    return files | {"config.json": content}


class HfWriter:
    """Context manager that writes one Hugging Face directory; one process uses it.

    `write` takes each tensor of `shapes` exactly once, in any order, from any device, and casts it
    to `dtype`. Everything goes to a hidden sibling of `out_dir`, which takes its name when the
    `with` block ends well, after all data is on disk; after an error nothing is left. Another
    process that writes there meanwhile gets a `UserError`.
    """

    def __init__(
        self,
        out_dir: Path,
        *,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        source_dir: Path,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        overwrite: bool = False,
    ) -> None:
        """source_dir: gives config.json, tokenizer, templates.

        Errors: `UserError` if `out_dir` exists, or with `overwrite` is what may not be deleted.
        """
        self.out_dir = Path(out_dir)
        check_out(self.out_dir, [Path(source_dir)], overwrite=overwrite)
        if dtype not in SAFETENSORS_DTYPES.values():
            raise ValueError(f"cannot write {dtype}")
        self._shapes, self._dtype, self._source_dir = shapes, dtype, Path(source_dir)
        self._shards = plan_shards(shapes, dtype, max_shard_bytes)
        self._place = {name: i for i, shard in enumerate(self._shards) for name in shard.offsets}
        self._remaining = set(shapes)
        self._partial = PartialDir(self.out_dir)
        self._data = self._partial.data
        self._files: list[int] = []

    def __enter__(self) -> Self:
        try:
            self._partial.lock()
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            self._partial.clear()
            self._data.mkdir(exist_ok=True)
            for name, content in side_files(self._source_dir, self._dtype).items():
                (self._data / name).parent.mkdir(exist_ok=True, parents=True)
                write_bytes(self._data / name, content)
            for shard in self._shards:
                path = self._data / shard.file_name
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
                self._files.append(file)
                os.ftruncate(file, shard.num_bytes)
                write_at(file, memoryview(shard.header), 0)
        except OSError as error:
            self._discard()
            raise self._unwritable(error) from None
        except BaseException:
            self._discard()
            raise
        return self

    def write(self, name: str, tensor: Tensor) -> None:
        """Puts one tensor in its place; ValueError for a wrong or repeated name or shape.

        Errors: `UserError` for a value that is too large for the dtype, or a failed write.
        """
        if name not in self._remaining:
            raise ValueError(f"tensor {name} is not expected, or was already written")
        if tuple(tensor.shape) != tuple(self._shapes[name]):
            raise ValueError(
                f"tensor {name} has shape {list(tensor.shape)}, not {list(self._shapes[name])}"
            )
        shard = self._place[name]
        cast = tensor.detach().to("cpu", self._dtype)
        check_cast(tensor.detach().to("cpu"), cast, f"tensor {name}")
        flat = cast.contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().data
        try:
            write_at(self._files[shard], data, self._shards[shard].offsets[name])
        except OSError as error:
            raise self._unwritable(error) from None
        self._remaining.discard(name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._discard()
            return
        try:
            self._finish()
        except OSError as write_error:
            self._discard()
            raise self._unwritable(write_error) from None
        except BaseException:
            self._discard()
            raise

    def _finish(self) -> None:
        if self._remaining:
            raise ValueError(f"tensors never written: {', '.join(sorted(self._remaining)[:8])}")
        while self._files:
            os.fsync(self._files[-1])
            os.close(self._files.pop())
        if len(self._shards) > 1:
            write_bytes(self._data / INDEX_NAME, index_of(self._shards))
        sync_path(self._data)
        self._partial.publish()
        self._partial.remove()

    def _discard(self) -> None:
        while self._files:
            os.close(self._files.pop())
        self._partial.remove()

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(
            f"{self.out_dir} could not be written: {error.strerror or error} "
            f"({error.filename or self._partial.path}); nothing was left behind"
        )


def write_hf_model(
    out_dir: Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    source_dir: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Writes a stream of (HF name, tensor) as a Hugging Face directory; see `HfWriter`.

    shapes: every tensor of the model, `WeightTable.hf_shapes()`.
    """
    with HfWriter(
        out_dir,
        shapes=shapes,
        dtype=dtype,
        source_dir=source_dir,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
    ) as writer:
        for name, tensor in tensors:
            writer.write(name, tensor)
