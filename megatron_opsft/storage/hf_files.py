"""Hugging Face model directories: found, opened, checked and read slice by slice."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_opsft.errors import UserError
from megatron_opsft.storage.model_paths import INDEX_NAME, SINGLE_NAME
from megatron_opsft.storage.regions import Region
from megatron_opsft.weights.rectangles import Rect, whole
from megatron_opsft.weights.rules import EMBEDDING, TIED_HEAD, WeightTable

COMPARED_ROWS = 8192  # of the head and the embedding at a time: bounds the memory of the comparison


SAFETENSORS_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_regions(path: Path) -> dict[str, Region]:
    """Name -> region of every tensor in a safetensors file; tensors are not read.

    Errors: `UserError`, naming file and tensor, for a file that is missing, damaged or cut short,
    or holds another dtype than float32, float16, bfloat16.
    """
    if not path.is_file():
        raise UserError(f"shard {path} is missing; the index lists it")
    try:
        with safe_open(path, framework="pt"):  # checks the header, and does not tell offsets
            pass
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{path} is damaged or cut short: {error}") from None
    header.pop("__metadata__", None)
    regions = {}
    for name, entry in header.items():
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
        """UserError, naming file and tensor, unless every shard is whole and fits the index; one
        file of all weights comes before an index, as in transformers.
        """
        self.model_dir = Path(model_dir)
        self._regions: dict[str, Region] = {}
        if (self.model_dir / SINGLE_NAME).is_file():
            self._regions = read_regions(self.model_dir / SINGLE_NAME)
        elif (self.model_dir / INDEX_NAME).is_file():
            self._read_indexed(self.model_dir / INDEX_NAME)
        else:
            raise UserError(
                f"{model_dir} holds no weights: neither {SINGLE_NAME} nor {INDEX_NAME}; download "
                "or convert the model again, or let transformers save it (save_pretrained)"
            )

    def dtype(self, name: str) -> torch.dtype:
        return self.region(name).dtype

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: region.shape for name, region in self._regions.items()}

    def files(self) -> tuple[Path, ...]:
        """The weight files, each once."""
        return tuple(dict.fromkeys(region.path for region in self._regions.values()))

    def region(self, name: str) -> Region:
        """Where a tensor lies; UserError for a name that is not there."""
        if name not in self._regions:
            raise UserError(f"{self.model_dir} holds no tensor {name}")
        return self._regions[name]

    def read(self, rect: Rect) -> Tensor:
        """A rectangle of a tensor; file's dtype, CPU.

        The result is a view of the mapped file (not contiguous where columns are cut): copy it, do
        not write to it. Only what is touched gets into memory.
        """
        rows = self.region(rect.tensor).rows(rect.row0, rect.row1)
        return rows if rows.dim() == 1 else rows[:, rect.col0 : rect.col1]

    def copy_rows(self, name: str, start: int, stop: int, out: Tensor) -> None:
        """`tensor[start:stop]`, read from disk and cast into `out`, which has that shape."""
        self.region(name).copy_rows(start, stop, out, name)

    def _read_indexed(self, index: Path) -> None:
        weight_map = _read_weight_map(index)
        for file in dict.fromkeys(weight_map.values()):
            path = self.model_dir / file
            for name, region in read_regions(path).items():
                if weight_map.get(name) != file:
                    raise UserError(
                        f"{path} holds tensor {name}, which {index.name} does not list for it"
                    )
                self._regions[name] = region
        for name, file in weight_map.items():
            if name not in self._regions:
                raise UserError(f"{index} says that tensor {name} is in {file}, but it is not")


def _read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{index} is not an index with a weight_map: {error!r}") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: weight_map must be a non-empty object")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise UserError(f"{index}: tensor {name} is mapped to {file!r}, not to a file name")
    return weight_map


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
    for start in range(0, embedding.row1, COMPARED_ROWS):
        stop = min(start + COMPARED_ROWS, embedding.row1)
        rows = replace(embedding, row0=start, row1=stop)
        if not torch.equal(tensors.read(replace(rows, tensor=TIED_HEAD)), tensors.read(rows)):
            raise UserError(
                f"{tensors.model_dir}: config.json says tie_word_embeddings=true, but {TIED_HEAD} "
                f"differs from {embedding.tensor}; set tie_word_embeddings to false if the head is "
                "meant to differ"
            )
