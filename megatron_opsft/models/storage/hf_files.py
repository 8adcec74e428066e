"""Hugging Face model directories: found, opened, checked and read slice by slice."""

import json
from collections.abc import Collection, Mapping
from functools import cache, partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_opsft.errors import UserError
from megatron_opsft.models.storage.model_paths import INDEX_NAME, SINGLE_NAME
from megatron_opsft.models.storage.regions import Region
from megatron_opsft.models.weights.rectangles import Rect, whole
from megatron_opsft.models.weights.rules import EMBEDDING, TIED_HEAD, WeightTable

SAFETENSORS_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def read_regions(
    path: Path, wanted: Collection[str] | None = None
) -> dict[str, Region]:
    """Name -> region of the tensors in a safetensors file; tensors are not read.

    wanted: the names that the index places in this file; others that lie there, such as an earlier
    version's, are no part of the model. None: all.
    Errors: `UserError`, naming file and tensor, for a file that is missing, damaged or cut short,
    lacks a tensor, or holds it in another dtype than float32, float16, bfloat16.
    """
    if not path.is_file():
        raise UserError(f"shard {path} is missing; {INDEX_NAME} lists it")
    try:
        with safe_open(
            path, framework="pt"
        ):  # checks the header, and does not tell offsets
            pass
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
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
            offset=8 + length + entry["data_offsets"][0],
            shape=tuple(entry["shape"]),
            dtype=SAFETENSORS_DTYPES[entry["dtype"]],
        )
    return regions


class HfTensors:
    """The tensors of a Hugging Face directory, in one file or in shards with an index; only headers
    are read until a slice is wanted.
    """

    def __init__(self, model_dir: Path) -> None:
        """UserError, naming the file, unless every shard is whole; one file of all weights comes
        before an index, as in transformers.
        """
        self.model_dir = Path(model_dir)
        self._open = cache(partial(safe_open, framework="pt"))
        self._regions: dict[str, Region] = {}
        for file, names in _weight_files(self.model_dir).items():
            self._regions |= read_regions(self.model_dir / file, names)

    def dtype(self, name: str) -> torch.dtype:
        return self._regions[name].dtype

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: region.shape for name, region in self._regions.items()}

    def files(self) -> tuple[Path, ...]:
        """The weight files, each once."""
        return tuple(self.names_by_file())

    def names_by_file(self) -> dict[Path, set[str]]:
        """Weight file -> the names of the model's tensors that are to be read from it."""
        names: dict[Path, set[str]] = {}
        for name, region in self._regions.items():
            names.setdefault(region.path, set()).add(name)
        return names

    def read(self, rect: Rect) -> Tensor:
        """A rectangle of a tensor; file's dtype, CPU."""
        stored = self._open(self._regions[rect.tensor].path).get_slice(rect.tensor)
        rows = slice(rect.row0, rect.row1)
        is_matrix = len(stored.get_shape()) == 2
        return stored[rows, rect.col0 : rect.col1] if is_matrix else stored[rows]

    def copy_rows(self, name: str, start: int, stop: int, out: Tensor) -> None:
        """`tensor[start:stop]`, read from disk and cast into `out`, which has that shape."""
        self._regions[name].copy_rows(start, stop, out, name)


def _weight_files(model_dir: Path) -> Mapping[str, Collection[str] | None]:
    """Names of the files with a model's weights -> the tensors that the index places there; None:
    all, in a file without an index. Errors: `UserError` where there are none.
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
        if files and all(Path(file).name == file for file in files):
            return files
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    raise UserError(
        f"{index} is not an index: its weight_map must map tensors to file names"
    )


def check_checkpoint(tensors: HfTensors, table: WeightTable) -> None:
    """UserError unless the directory holds exactly the tensors of the table.

    A tied checkpoint that repeats the embedding as `lm_head.weight` must repeat it bit for bit:
    otherwise transformers does not tie it, and training it as tied would silently be another model.
    Reads headers only, except for such a repeated head; one rank is enough.
    """
    table.check_hf(tensors.shapes(), str(tensors.model_dir))
    if not (table.shape.tied_embeddings and TIED_HEAD in tensors.shapes()):
        return
    name = EMBEDDING.hf_tensors[0][0]
    embedding = whole(name, tensors.shapes()[name])
    if not torch.equal(
        tensors.read(embedding._replace(tensor=TIED_HEAD)), tensors.read(embedding)
    ):
        raise UserError(
            f"{tensors.model_dir}: config.json says tie_word_embeddings=true, but {TIED_HEAD} "
            f"differs from {embedding.tensor}; set tie_word_embeddings to false if the head is "
            "meant to differ"
        )
