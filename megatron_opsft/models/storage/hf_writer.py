"""Writing a Hugging Face model directory: in any order, and visible only when complete.

Every byte of an output has its place before the first one is written, so tensors can be written in
any order, and nothing is held back in memory (safetensors' own writer needs a whole shard at once).
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from megatron_opsft.models.storage.hf_files import SAFETENSORS_DTYPES
from megatron_opsft.models.storage.model_paths import INDEX_NAME
from megatron_opsft.models.storage.partial import PlannedFile, written_whole
from megatron_opsft.models.storage.regions import Region, check_cast
from megatron_opsft.models.storage.replacing import check_out
from megatron_opsft.models.weights.rectangles import Copy, whole
from megatron_opsft.runtime.durable import write_files

MAX_SHARD_BYTES = 5_000_000_000
COPIED_PATTERNS = (
    *(
        "generation_config.json",
        "tokenizer*",
        "special_tokens_map.json",
        "added_tokens.json",
    ),
    *("vocab.json", "vocab.txt", "merges.txt", "*.tiktoken", "tekken.json", "*.model"),
    *("chat_template*", "additional_chat_templates", "custom_generate"),
)


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the output.

    region: its place; the path is relative to the directory. parts: copies from HF tensors that
    fill its rows in order from the first on; rows behind them stay zero.
    """

    name: str
    region: Region
    parts: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The files of an output, except those copied from the source directory."""

    files: tuple[PlannedFile, ...]
    targets: tuple[Target, ...]
    small_files: dict[str, bytes]


def hf_layout(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, max_shard_bytes: int
) -> FileLayout:
    """A Hugging Face directory: safetensors shards of at most `max_shard_bytes`, and their index.

    A larger tensor gets a file of its own. Names follow the hub's convention. dtype: one of
    SAFETENSORS_DTYPES.
    """
    split = split_state_dict_into_shards_factory(
        dict(shapes),
        get_storage_size=lambda shape: prod(shape) * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    files: list[PlannedFile] = []
    targets: list[Target] = []
    for file_name, names in split.filename_to_tensors.items():
        header, offsets, num_bytes = _safetensors(names, shapes, dtype)
        files.append(PlannedFile(file_name, num_bytes, ((0, header),)))
        for name, offset in offsets.items():
            rect = whole(name, shapes[name])
            region = Region(Path(file_name), offset, tuple(shapes[name]), dtype)
            targets.append(Target(name, region, (Copy(rect, rect),)))
    layout = FileLayout(tuple(files), tuple(targets), {})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
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
    return (
        header,
        {n: s + len(header) for n, s in starts.items()},
        position + len(header),
    )


def side_files(model_dir: Path, dtype: torch.dtype) -> dict[str, bytes]:
    """Config, generation config, tokenizer, chat template: relative name -> content.

    dtype: what config.json should say.
    """
    files = {
        str(path.relative_to(model_dir)): path.read_bytes()
        for found in {p for pattern in COPIED_PATTERNS for p in model_dir.glob(pattern)}
        for path in (found.rglob("*") if found.is_dir() else [found])
        if path.is_file()
    }
    config = json.loads((model_dir / "config.json").read_bytes())
    for key in [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]:
        config[key] = str(dtype).removeprefix("torch.")
    content = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    return files | {"config.json": content}


def write_hf_model(
    out_dir: Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    source_dir: Path,
    card: str = "",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Writes a stream of (HF name, tensor) as a Hugging Face directory; one process calls it.

    tensors: each of `shapes` once, in any order, on any device; cast to `dtype`. shapes: every
    tensor of the model, `WeightTable.hf_shapes()`. source_dir: gives config.json, tokenizer,
    templates. card: the text of README.md, if there is one.

    Everything goes to a hidden sibling of `out_dir`, which takes its name after all data is on
    disk; after an error nothing is left.
    Errors: `UserError` if `out_dir` exists, or with `overwrite` is what may not be deleted; if
    another process writes there; for a value that is too large for the dtype; for a failed write.
    ValueError for a missing name.
    """
    check_out(out_dir, [source_dir], overwrite=overwrite)
    layout = hf_layout(shapes, dtype, max_shard_bytes)
    remaining = {target.name: target.region for target in layout.targets}
    with written_whole(out_dir, layout.files) as partial:
        small_files = side_files(source_dir, dtype) | layout.small_files
        if card:
            small_files["README.md"] = card.encode()
        write_files(partial.directory, small_files)
        for name, tensor in tensors:
            region, held = remaining.pop(name), tensor.detach().to("cpu")
            assert tuple(held.shape) == region.shape, name
            cast = held.to(region.dtype)
            check_cast(held, cast, f"tensor {name}")
            data = cast.contiguous().reshape(-1).view(torch.uint8).numpy().data
            partial.files[str(region.path)].write(data, region.offset)
        if remaining:
            raise ValueError(
                f"tensors never written: {', '.join(sorted(remaining)[:8])}"
            )
