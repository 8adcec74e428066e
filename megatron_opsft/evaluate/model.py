"""The model of an evaluation: found, checked against its tokenizer, hashed and read."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megatron_opsft.architectures.config_from_hf import read_model_shape
from megatron_opsft.data.prompts import check_vocabulary, end_token_ids, load_tokenizer
from megatron_opsft.storage.megatron_files import open_weights
from megatron_opsft.storage.model_paths import TINY_REASONER, resolve_model
from megatron_opsft.weights.rectangles import whole
from megatron_opsft.weights.rules import WeightTable

_HASH_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalModel:
    """An opened model; no weight was read yet. `name`: its label in tables and figures."""

    name: str
    directory: Path
    tokenizer: PreTrainedTokenizerBase
    end_tokens: tuple[int, ...]
    table: WeightTable

    @property
    def max_positions(self) -> int:
        """The longest prompt and response together."""
        return self.table.shape.max_position_embeddings

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(HF name, whole tensor on the CPU in the files' dtype), in the order of the table."""
        opened = open_weights(self.directory, self.table, check=False)
        for name, shape in self.table.hf_shapes().items():
            yield name, opened.read(whole(name, shape))

    def identity(self) -> dict[str, Any]:
        """JSON of all that decides a sample: weights, what config.json makes of them, tokenizer,
        end tokens. Reads every weight.
        """
        return {
            "model_sha256": self.weights_sha256(),
            "shape": asdict(self.table.shape),
            "tokenizer_sha256": self.tokenizer_sha256(),
            "end_tokens": sorted(self.end_tokens),
        }

    def weights_sha256(self) -> str:
        """Hash of names, dtypes, shapes and values: the same for any cut or conversion."""
        with ThreadPoolExecutor(_HASH_THREADS) as pool:
            digest = hashlib.sha256()
            for line in pool.map(_describe, self.tensors()):
                digest.update(line.encode())
        return digest.hexdigest()

    def tokenizer_sha256(self) -> str:
        """Hash of the vocabulary with its merges and of the chat template."""
        digest = hashlib.sha256()
        file = self.directory / "tokenizer.json"
        if file.is_file():
            digest.update(file.read_bytes())
        else:
            digest.update(repr(sorted(self.tokenizer.get_vocab().items())).encode())
        digest.update(str(self.tokenizer.chat_template).encode())
        return digest.hexdigest()


def open_model(path: str, name: str | None = None, *, option: str = "--model") -> EvalModel:
    """Find a model and check it without reading its weights.

    path: what `resolve_model` takes. option: what errors call it. Errors: `UserError` for a missing
    or damaged model, an unsupported one, a tokenizer without a chat template or of another model.
    """
    directory = resolve_model(path, option=option)
    tokenizer = load_tokenizer(directory, option=option)
    shape = read_model_shape(directory)
    table = WeightTable(shape, "te")
    open_weights(directory, table)
    end_tokens = end_token_ids(tokenizer, directory, option=option)
    check_vocabulary(tokenizer, end_tokens, shape.vocab_size, directory, option=option)
    return EvalModel(
        name=name or _label(path, directory),
        directory=directory,
        tokenizer=tokenizer,
        end_tokens=end_tokens,
        table=table,
    )


def is_tiny_reasoner(model: EvalModel) -> bool:
    """Whether it has the tokenizer of the shipped model: that one itself, or trained further."""
    shipped = resolve_model(TINY_REASONER) / "tokenizer.json"
    own = model.directory / "tokenizer.json"
    return own.is_file() and own.read_bytes() == shipped.read_bytes()


def _label(path: str, directory: Path) -> str:
    """What people call it: the end of a hub's name, the folder; of a run its own, not `hf`."""
    if not Path(path).expanduser().exists():
        return path.rpartition("/")[2]
    named = directory.parent if directory.name == "hf" else directory
    return named.resolve().name


def _describe(item: tuple[str, Tensor]) -> str:
    name, tensor = item
    values = tensor.contiguous().view(torch.uint8).numpy()
    digest = hashlib.sha256(values.data).hexdigest()
    return f"{name} {tensor.dtype} {tuple(tensor.shape)} {digest}\n"
