"""Open, check and read Hugging Face model directories, slice by slice."""

import json
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_opsft.errors import UserError
from megatron_opsft.models.storage.large_files import Region
from megatron_opsft.models.storage.model_paths import (
    INDEX_NAME,
    SINGLE_NAME,
    STACKS_EXPERTS,
    has_hf_weights,
    read_record,
)
from megatron_opsft.models.weights.expert_stacks import matrices_of
from megatron_opsft.models.weights.rectangles import Rect, whole
from megatron_opsft.models.weights.rules import HEAD_NAME, WeightTable
from megatron_opsft.records import TensorShape

SAFETENSORS_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def read_regions(
    path: Path, wanted: Collection[str] | None = None
) -> dict[str, Region]:
    """Read name -> region of the tensors in a safetensors file, but not the tensors.

    wanted: the names that the index places in this file; None: all. Other tensors in the file, such
    as an earlier version's, do not belong to the model.
    Errors: `UserError`, naming file and tensor, for a file that is missing, damaged or cut short,
    lacks a tensor, or holds it in another dtype than float32, float16, bfloat16.
    """
    if not path.is_file():
        raise UserError(f"shard {path} is missing; {INDEX_NAME} lists it")
    try:
        # It checks the header, but does not say at which offsets the tensors are.
        with safe_open(path, framework="pt"):
            pass
        with open(path, "rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{path} is damaged or cut short: {error}") from None
    header.pop("__metadata__", None)
    regions = {}
    for name in header if wanted is None else wanted:
        entry = header.get(name)
        if entry is None:
            raise UserError(
                f"{path} lacks tensor {name}, which {INDEX_NAME} places there"
            )
        if entry["dtype"] not in SAFETENSORS_DTYPES:
            raise UserError(
                f"{path}: tensor {name} has dtype {entry['dtype']}; supported: "
                f"{', '.join(SAFETENSORS_DTYPES)} (quantised checkpoints are not)"
            )
        regions[name] = Region(
            path=path,
            offset=8 + header_bytes + entry["data_offsets"][0],
            shape=tuple(entry["shape"]),
            dtype=SAFETENSORS_DTYPES[entry["dtype"]],
        )
    return regions


class HfTensors:
    """The tensors of a Hugging Face directory, in one file or in shards with an index.

    Only headers are read until a slice is wanted. Experts have a matrix each, also if the files
    stack them.
    """

    def __init__(self, model_dir: Path) -> None:
        """Read the headers. A single file of all weights is preferred to an index, as in
        transformers. Errors: `UserError`, naming the file, unless every shard is whole.
        """
        self.model_dir = model_dir
        self._open = cache(partial(safe_open, framework="pt"))
        # By the names in the files, and with each expert's matrices by themselves.
        self._in_files: dict[str, Region] = {}
        for file, names in _weight_files(model_dir).items():
            self._in_files |= read_regions(model_dir / file, names)
        self._regions = matrix_regions(self._in_files)

    def dtype(self, name: str) -> torch.dtype:
        return self._regions[name].dtype

    def shapes(self) -> dict[str, TensorShape]:
        return {name: region.shape for name, region in self._regions.items()}

    @property
    def stacks_experts(self) -> bool:
        """True if the files stack experts."""
        return self._in_files.keys() != self._regions.keys()

    def regions(self, is_wanted: Callable[[str], bool]) -> dict[str, Region]:
        """Return name -> region of the tensors with a name that is wanted."""
        return {
            name: region for name, region in self._regions.items() if is_wanted(name)
        }

    def files(self) -> tuple[Path, ...]:
        """The weight files, each once."""
        return tuple(self.names_by_file())

    def names_by_file(self) -> dict[Path, set[str]]:
        """Return weight file -> names that the model's tensors in it have there."""
        names: dict[Path, set[str]] = {}
        for name, region in self._in_files.items():
            names.setdefault(region.path, set()).add(name)
        return names

    def read(self, rect: Rect) -> Tensor:
        """Read a rectangle of a tensor, in the file's dtype, on the CPU."""
        if rect.tensor not in self._in_files:
            return self._read_from_stack(rect)
        stored = self._open(self._regions[rect.tensor].path).get_slice(rect.tensor)
        rows = slice(rect.row0, rect.row1)
        if len(stored.get_shape()) == 2:
            return stored[rows, rect.col0 : rect.col1]
        # A vector has no columns, and of a tensor with more axes a rectangle has them all.
        return stored[rows] if len(stored.get_shape()) == 1 else stored[rows].flatten(1)

    def _read_from_stack(self, rect: Rect) -> Tensor:
        """Read a rectangle of an expert's matrix."""
        region = self._regions[rect.tensor]
        shape = (rect.row1 - rect.row0, region.shape[1])
        rows = torch.empty(shape, dtype=region.dtype)
        region.copy_rows(rect.row0, rows, rect.tensor)
        return rows[:, rect.col0 : rect.col1]

    def copy_rows(self, name: str, start: int, out: Tensor) -> None:
        """Read as many rows as `out` has, from row `start` on, and cast them into it."""
        self._regions[name].copy_rows(start, out, name)


def matrix_regions(in_files: Mapping[str, Region]) -> dict[str, Region]:
    """Return name -> region of tensors, with one for each expert's matrix in place of a stack."""
    regions = {}
    for name, region in in_files.items():
        offset = region.offset
        shapes = matrices_of(name, region.shape) or {name: region.shape}
        for matrix, shape in shapes.items():
            regions[matrix] = region._replace(offset=offset, shape=shape)
            offset += regions[matrix].num_bytes
    return regions


def stacks_experts(table: WeightTable, *model_dirs: Path) -> bool:
    """Return whether a model is to be written with its experts in stacks: as in the first of these
    directories that has weights in Hugging Face's format or was converted from it; else as
    published models are.

    Errors: `UserError` for a damaged file.
    """
    if not table.num_experts:
        return False
    for model_dir in model_dirs:
        if has_hf_weights(model_dir):
            return HfTensors(model_dir).stacks_experts
        record = read_record(model_dir)
        if STACKS_EXPERTS in record:
            return bool(record[STACKS_EXPERTS])
    return table.architecture.stacks_experts


def _weight_files(model_dir: Path) -> Mapping[str, Collection[str] | None]:
    """Return file name -> names of the tensors that the index places in it; None: all tensors of
    the only file. Errors: `UserError` for a directory without weights, or with a bad index.
    """
    if (model_dir / SINGLE_NAME).is_file():
        return {SINGLE_NAME: None}
    index = model_dir / INDEX_NAME
    if not index.is_file():
        raise UserError(
            f"{model_dir} holds no weights: neither {SINGLE_NAME} nor {INDEX_NAME}; download "
            "or convert the model again, or let transformers save it (save_pretrained)"
        )
    files: dict[str, list[str]] = {}
    try:
        for name, file in json.loads(index.read_text("utf-8"))["weight_map"].items():
            files.setdefault(file, []).append(name)
        is_index = files != {} and all(Path(file).name == file for file in files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        is_index = False
    if not is_index:
        raise UserError(
            f"{index} is not an index: its weight_map must map tensors to file names"
        )
    return files


def check_checkpoint(tensors: HfTensors, table: WeightTable) -> None:
    """Check that the directory holds exactly the tensors of the table. Errors: `UserError`.

    A tied checkpoint that repeats the embedding as `lm_head.weight` must repeat it bit for bit:
    otherwise transformers does not tie it, and training it as tied would silently train another
    model. Only headers are read, and such a repeated head. It is enough if one rank calls it.
    """
    table.check_hf(tensors.shapes(), str(tensors.model_dir))
    if not (table.shape.tied_embeddings and HEAD_NAME in tensors.shapes()):
        return
    name = table.embedding_name
    embedding = whole(name, tensors.shapes()[name])
    head = embedding._replace(tensor=HEAD_NAME)
    if not torch.equal(tensors.read(head), tensors.read(embedding)):
        raise UserError(
            f"{tensors.model_dir}: config.json says tie_word_embeddings=true, but {HEAD_NAME} "
            f"differs from {name}; set tie_word_embeddings to false if the head is "
            "meant to differ"
        )
