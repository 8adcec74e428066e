"""A model on disk in either format: its weights under HF names, and the small files around them."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megatron_opsft.architectures.config_from_hf import read_model_shape
from megatron_opsft.errors import UserError
from megatron_opsft.storage.hf_shards import SAFETENSORS_DTYPES
from megatron_opsft.storage.hf_writer import side_files
from megatron_opsft.storage.known_files import METADATA_NAME, is_dist_checkpoint
from megatron_opsft.storage.model_paths import resolve_model
from megatron_opsft.storage.opened import open_weights
from megatron_opsft.weights.rules import WeightTable


class Tensors(Protocol):
    """What `HfTensors` and `MegatronTensors` have in common."""

    def dtype(self, name: str) -> torch.dtype: ...
    def files(self) -> tuple[Path, ...]: ...
    def header(self) -> bytes: ...
    def copy_rows(self, name: str, start: int, stop: int, out: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class Source:
    """An opened model. `table` has TransformerEngine's names, which checkpoints use."""

    directory: Path
    config_dir: Path
    table: WeightTable
    tensors: Tensors
    is_megatron: bool

    def copy_rows(self, name: str, start: int, stop: int, out: Tensor) -> None:
        """`tensor[start:stop]`, read from disk and cast into `out`. Errors: `UserError`."""
        self.tensors.copy_rows(name, start, stop, out)

    def paths(self) -> tuple[Path, ...]:
        """Everything that is read: directories, and the weight files, which links may lead to."""
        return (self.directory, self.config_dir, *self.tensors.files())

    def only_dtype(self) -> torch.dtype:
        """The dtype of all weights. Errors: `UserError` naming one that has another."""
        names = list(self.table.hf_shapes())
        first = self.tensors.dtype(names[0])
        for name in names:
            if self.tensors.dtype(name) is not first:
                raise UserError(
                    f"{self.directory}: tensor {name} is {self.tensors.dtype(name)}, but "
                    f"{names[0]} is {first}; give --dtype to convert all to one"
                )
        if first not in SAFETENSORS_DTYPES.values():
            raise UserError(f"{self.directory}: {first} is not supported; give --dtype")
        return first

    def identity(self) -> str:
        """A digest that changes when the source does.

        It has the headers (names, shapes, dtypes, offsets), of each file the path, inode, size and
        time, and whatever comes along with the weights.
        """
        digest = hashlib.sha256(self.tensors.header())
        extra = [self.directory / METADATA_NAME] if self.is_megatron else []
        for path in [*self.tensors.files(), *extra]:
            stat = path.stat()
            # Not the device: network file systems get another one whenever they are mounted.
            values = (path.resolve(), stat.st_ino, stat.st_size, stat.st_mtime_ns)
            digest.update(f"{values}\n".encode())
        for name, content in sorted(side_files(self.config_dir, None).items()):
            digest.update(f"{name} {len(content)}\n".encode() + content)
        return digest.hexdigest()


def open_source(directory: Path, config_dir: Path | None = None) -> Source:
    """Open a Hugging Face directory or a Megatron checkpoint and check it without reading weights.

    config_dir: Hugging Face directory of the configuration and tokenizer, where the checkpoint does
    not hold them itself.
    Errors: `UserError` naming what is missing, unexpected or damaged.
    """
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory")
    is_megatron = is_dist_checkpoint(directory)
    if config_dir is not None:
        config_dir = resolve_model(str(config_dir), option="--config-from")
    if is_megatron and config_dir is None and not (directory / "config.json").is_file():
        raise UserError(
            f"{directory} holds no config.json; give --config-from with the Hugging Face directory "
            "that the model came from"
        )
    config_dir = config_dir or directory
    table = WeightTable(read_model_shape(config_dir), "te")
    return Source(directory, config_dir, table, open_weights(directory, table), is_megatron)
