"""Hugging Face model directories: found, opened, checked and read slice by slice."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_opsft.errors import UserError
from megatron_opsft.weights.rules import EMBEDDING, TIED_HEAD, WeightTable

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
TINY_REASONER = "tiny_reasoner"
ASSETS = Path(__file__).parent.parent / "assets"
HUB_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
COMPARED_ROWS = 8192  # of the head and the embedding at a time: bounds the memory of the comparison


def resolve_model(name: str) -> Path:
    """The directory of a model: a directory itself, `tiny_reasoner` (shipped), or a hub name.

    A hub name is downloaded once to the Hugging Face cache; UserError where it cannot be.
    """
    if name == TINY_REASONER:
        return ASSETS / TINY_REASONER
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"model.path={name} is a file; give the directory that holds config.json")
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        raise UserError(
            f"model.path={name} is no directory; give a Hugging Face model directory, a hub name "
            f"such as Qwen/Qwen3-0.6B, or {TINY_REASONER}"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_PATTERNS))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        raise UserError(
            f"model.path={name} is no local directory and could not be fetched from the Hugging "
            "Face hub "
            f"({type(error).__name__}: {reason}); download it where there is a network and give "
            "its directory"
        ) from None


class HfTensors:
    """The tensors of a Hugging Face directory; only headers are read until a slice is wanted.

    Either `model.safetensors.index.json` with its shards or a single `model.safetensors`. A file is
    mapped only while a tensor read from it lives, so resident memory stays at what the caller
    holds.
    """

    def __init__(self, model_dir: Path) -> None:
        """UserError, naming file and tensor, unless every shard is whole and fits the index."""
        self.model_dir = Path(model_dir)
        self._files = self._read_index()
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        for file in dict.fromkeys(self._files.values()):
            self._read_header(file)
        for name, file in self._files.items():
            if name not in self._shapes:
                raise UserError(
                    f"{self.model_dir / INDEX_NAME} says that tensor {name} is in {file}, but it "
                    "is not"
                )

    def names(self) -> tuple[str, ...]:
        return tuple(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[self._known(name)]

    def dtype(self, name: str) -> torch.dtype:
        return self._dtypes[self._known(name)]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._shapes)

    def read(self, name: str, axis: int, start: int, stop: int) -> Tensor:
        """`tensor[start:stop]` along axis 0 or 1, whole along the other; file's dtype, CPU.

        The result is a view of the mapped file (not contiguous for axis 1): copy it, do not write
        to it.
        """
        path = self.model_dir / self._files[self._known(name)]
        try:
            with safe_open(path, framework="pt") as file:
                part = file.get_slice(name)
                return part[start:stop] if axis == 0 else part[:, start:stop]
        except (OSError, SafetensorError) as error:
            raise UserError(f"tensor {name} cannot be read from {path}: {error}") from None

    def _known(self, name: str) -> str:
        if name not in self._files:
            raise UserError(f"{self.model_dir} holds no tensor {name}")
        return name

    def _read_index(self) -> dict[str, str]:
        """Tensor name -> file name; for a single file from its header."""
        index, single = self.model_dir / INDEX_NAME, self.model_dir / SINGLE_NAME
        if not index.exists():
            if single.exists():
                return dict.fromkeys(_header_names(single), SINGLE_NAME)
            raise UserError(
                f"{self.model_dir} holds neither {SINGLE_NAME} nor {INDEX_NAME}; weights must be "
                "in safetensors format, and several shards need their index"
            )
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

    def _read_header(self, file: str) -> None:
        path = self.model_dir / file
        for name in _header_names(path):
            if self._files.get(name) != file:
                raise UserError(
                    f"{path} holds tensor {name}, which {INDEX_NAME} does not list for it"
                )
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                part = opened.get_slice(name)
                self._shapes[name] = tuple(part.get_shape())
                self._dtypes[name] = _torch_dtype(part.get_dtype(), name, path)


def check_checkpoint(tensors: HfTensors, table: WeightTable) -> None:
    """UserError unless the directory holds exactly the tensors of the table.

    A tied checkpoint that repeats the embedding as `lm_head.weight` must repeat it bit for bit:
    otherwise transformers does not tie it, and training it as tied would silently be another model.
    Reads headers only, except for such a repeated head; one rank is enough.
    """
    table.check_hf(tensors.shapes(), str(tensors.model_dir))
    if not (table.shape.tied_embeddings and TIED_HEAD in tensors.names()):
        return
    embedding = EMBEDDING.hf_tensors[0][0]
    for start in range(0, table.shape.vocab_size, COMPARED_ROWS):
        stop = min(start + COMPARED_ROWS, table.shape.vocab_size)
        if not torch.equal(
            tensors.read(TIED_HEAD, 0, start, stop), tensors.read(embedding, 0, start, stop)
        ):
            raise UserError(
                f"{tensors.model_dir}: config.json says tie_word_embeddings=true, but {TIED_HEAD} "
                "differs "
                f"from {embedding}; set tie_word_embeddings to false if the head is meant to differ"
            )


SAFETENSORS_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _torch_dtype(name: str, tensor_name: str, path: Path) -> torch.dtype:
    if name not in SAFETENSORS_DTYPES:
        raise UserError(
            f"{path}: tensor {tensor_name} has dtype {name}; supported: "
            f"{', '.join(SAFETENSORS_DTYPES)} (quantised checkpoints are not)"
        )
    return SAFETENSORS_DTYPES[name]


def _header_names(path: Path) -> list[str]:
    """Tensor names in a file; UserError if it is missing, cut short or no safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except FileNotFoundError:
        raise UserError(f"shard {path} is missing; {INDEX_NAME} lists it") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is damaged or cut short: {error}") from None
