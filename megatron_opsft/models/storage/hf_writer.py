"""Write a Hugging Face model directory, which becomes visible when it is complete.

All file offsets are known before the first byte is written, so tensors can be written in any order
and need not be collected in memory (safetensors' own writer needs a whole shard at once).
"""

import json
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from megatron_opsft.errors import UserError
from megatron_opsft.models.storage.hf_files import SAFETENSORS_DTYPES, matrix_regions
from megatron_opsft.models.storage.large_files import (
    Region,
    check_cast,
    copy_region,
    memory_of,
)
from megatron_opsft.models.storage.model_paths import COPIED_PATTERNS, INDEX_NAME
from megatron_opsft.models.storage.partial import PlannedFile, written_whole
from megatron_opsft.models.storage.replacing import check_out
from megatron_opsft.models.weights.expert_stacks import matrices_of, stacked
from megatron_opsft.models.weights.rectangles import Copy, whole
from megatron_opsft.records import TensorShape
from megatron_opsft.runtime.durable import write_files

MAX_SHARD_BYTES = 5_000_000_000


class Target(NamedTuple):
    """A tensor of the output."""

    name: str
    region: Region
    """Where it goes; the path is relative to the directory."""
    copies: tuple[Copy, ...]
    """Copies from HF tensors that fill its first rows in order; the rows after them are zero."""


class FileLayout(NamedTuple):
    """The files of an output, except those copied from the source directory."""

    files: tuple[PlannedFile, ...]
    targets: tuple[Target, ...]
    small_files: dict[str, bytes]


def hf_layout(
    shapes: Mapping[str, TensorShape],
    dtypes: Mapping[str, torch.dtype],
    max_shard_bytes: int,
    *,
    stack_experts: bool = False,
) -> FileLayout:
    """Plan a Hugging Face directory: safetensors shards of at most `max_shard_bytes`, and an index.

    A larger tensor gets a file of its own. Names follow the hub's convention. dtypes: of each
    tensor one of SAFETENSORS_DTYPES. stack_experts: the files have the experts of a layer in two
    tensors; a target still is one expert's matrix.
    """
    in_files = dict(shapes)
    if stack_experts:
        in_files = stacked(shapes)
        dtypes = _dtypes_in_files(in_files, dtypes)
    split = split_state_dict_into_shards_factory(
        {name: (shape, dtypes[name]) for name, shape in in_files.items()},
        get_storage_size=_num_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    files = []
    targets = []
    for file_name, names in split.filename_to_tensors.items():
        file, targets_in_file = plan_safetensors(
            file_name, {name: in_files[name] for name in names}, dtypes
        )
        files.append(file)
        targets += targets_in_file
    small_files = {}
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        small_files[INDEX_NAME] = (json.dumps(index, indent=2) + "\n").encode()
    return FileLayout(tuple(files), tuple(targets), small_files)


def _dtypes_in_files(
    in_files: Mapping[str, TensorShape], dtypes: Mapping[str, torch.dtype]
) -> dict[str, torch.dtype]:
    """Return name -> dtype of tensors, of which some are stacks.

    dtypes: of each expert's matrix by itself. Errors: `UserError` if they differ within a stack.
    """
    found = {}
    for name, shape in in_files.items():
        of_matrices = {dtypes[matrix] for matrix in matrices_of(name, shape) or [name]}
        if len(of_matrices) > 1:
            raise UserError(
                f"the experts of {name} have several dtypes; give --dtype to convert all to one"
            )
        found[name] = of_matrices.pop()
    return found


def _num_bytes(tensor: tuple[TensorShape, torch.dtype]) -> int:
    shape, dtype = tensor
    return prod(shape) * dtype.itemsize


def plan_safetensors(
    file_name: str,
    shapes: Mapping[str, TensorShape],
    dtypes: Mapping[str, torch.dtype],
) -> tuple[PlannedFile, list[Target]]:
    """Plan a safetensors file of these tensors, which are copied whole; of a stack of experts, each
    matrix by itself.
    """
    header = _safetensors_header(shapes, dtypes)
    regions, offset = {}, len(header)
    for name, shape in shapes.items():
        regions[name] = Region(Path(file_name), offset, shape, dtypes[name])
        offset += regions[name].num_bytes
    targets = []
    for name, region in matrix_regions(regions).items():
        rect = whole(name, region.shape)
        targets.append(Target(name, region, (Copy(rect, rect),)))
    return PlannedFile(file_name, offset, ((0, header),)), targets


def _safetensors_header(
    shapes: Mapping[str, TensorShape], dtypes: Mapping[str, torch.dtype]
) -> bytes:
    """Make the header of a file: its length as u64, then JSON padded to 8 bytes. The tensors follow
    it without gaps.
    """
    dtype_names = {value: key for key, value in SAFETENSORS_DTYPES.items()}
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    stop = 0
    for name, shape in shapes.items():
        start, stop = stop, stop + prod(shape) * dtypes[name].itemsize
        entries[name] = {
            "dtype": dtype_names[dtypes[name]],
            "shape": list(shape),
            "data_offsets": [start, stop],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def side_files(model_dir: Path, dtype: torch.dtype) -> dict[str, bytes]:
    """Read config, generation config, tokenizer, chat template: relative name -> content.

    dtype: what config.json should say.
    """
    paths: set[Path] = set()
    for pattern in COPIED_PATTERNS:
        for path in model_dir.glob(pattern):
            paths.update(path.rglob("*") if path.is_dir() else [path])
    files = {}
    for path in paths:
        if path.is_file():
            files[str(path.relative_to(model_dir))] = path.read_bytes()
    config = json.loads((model_dir / "config.json").read_bytes())
    named = str(dtype).removeprefix("torch.")
    for key in config.keys() & {"dtype", "torch_dtype"} or ["dtype"]:
        config[key] = named
    for part in config.values():  # the configurations of a language model and of vision
        if isinstance(part, dict):
            part |= dict.fromkeys(part.keys() & {"dtype", "torch_dtype"}, named)
    content = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    return files | {"config.json": content}


def write_hf_model(
    out_dir: Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    shapes: Mapping[str, TensorShape],
    dtype: torch.dtype,
    source_dir: Path,
    carried: Mapping[str, Region] = MappingProxyType({}),
    stack_experts: bool = False,
    more_files: Mapping[str, bytes] = MappingProxyType({}),
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Write a stream of (HF name, tensor) as a Hugging Face directory; one process calls it.

    tensors: each of `shapes` once, in any order, on any device; cast to `dtype`.
    shapes: every tensor of the model, as `WeightTable.hf_shapes` returns them.
    source_dir: the model whose config.json, tokenizer and templates are copied.
    carried: tensors of other parts of the model, which are copied as they are.
    stack_experts: see `hf_layout`.
    more_files: relative name -> content of files that are written too, such as README.md.

    Everything goes to a hidden sibling of `out_dir`, which takes its name when all data is on disk.
    After an error nothing remains.
    Errors: `UserError` if `out_dir` exists, or with `overwrite` holds something that must not be
    deleted; if another process writes there; for a value that is too large for the dtype; for a
    failed write. ValueError for a missing name.
    """
    check_out(out_dir, [source_dir], overwrite=overwrite)
    carried_shapes = {name: region.shape for name, region in carried.items()}
    dtypes = dict.fromkeys(shapes, dtype)
    dtypes |= {name: region.dtype for name, region in carried.items()}
    layout = hf_layout(
        {**shapes, **carried_shapes},
        dtypes,
        max_shard_bytes,
        stack_experts=stack_experts,
    )
    remaining = {target.name: target.region for target in layout.targets}
    with written_whole(out_dir, layout.files) as partial:
        small_files = side_files(source_dir, dtype) | layout.small_files
        write_files(partial.directory, {**small_files, **more_files})
        for name, tensor in tensors:
            region = remaining.pop(name)
            values = tensor.detach().to("cpu")
            assert values.shape == region.shape, name
            cast = values.to(region.dtype)
            check_cast(values, cast, f"tensor {name}")
            data = memory_of(cast.contiguous())
            partial.files[str(region.path)].write(data, region.offset)
        for name, source in carried.items():
            target = remaining.pop(name)
            copy_region(source, target, partial.files[str(target.path)], name)
        if remaining:
            raise ValueError(
                f"tensors never written: {', '.join(sorted(remaining)[:8])}"
            )
