"""A model on disk in either format: its weights under HF names, and the small files around them."""

from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_opsft.architectures.config_from_hf import read_model_shape
from megatron_opsft.errors import UserError
from megatron_opsft.storage.hf_files import SAFETENSORS_DTYPES
from megatron_opsft.storage.known_files import is_dist_checkpoint
from megatron_opsft.storage.model_paths import resolve_model
from megatron_opsft.storage.opened import StoredWeights, open_weights
from megatron_opsft.weights.rules import WeightTable


@dataclass(frozen=True, slots=True)
class Source:
    """An opened model. `table` has TransformerEngine's names, which checkpoints use."""

    directory: Path
    config_dir: Path
    table: WeightTable
    tensors: StoredWeights
    is_megatron: bool

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
