"""LoRA adapters on disk: PEFT's directories, and the checkpoints of runs that train one.

The values of A and B have the names of `models/weights/lora.py`; PEFT's files have a prefix before
them. A checkpoint has them as they are.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from megatron_opsft.config.training import LoraConfig
from megatron_opsft.errors import UserError
from megatron_opsft.models.storage.dist_metadata import (
    StoredTensor,
    locate,
    read_metadata,
)
from megatron_opsft.models.storage.hf_files import HfTensors, read_regions
from megatron_opsft.models.storage.large_files import Region
from megatron_opsft.models.storage.megatron_files import MegatronTensors
from megatron_opsft.models.storage.model_paths import (
    ADAPTER_NAME,
    ADAPTER_WEIGHTS,
    is_dist_checkpoint,
)
from megatron_opsft.models.weights.lora import LORA_A, LORA_B, adapters_of_rules
from megatron_opsft.models.weights.rectangles import Rect, whole
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.records import TensorShape

_PREFIX = "base_model.model."


class StoredAdapter:
    """The values of an adapter on disk; a factor is read when it is asked for."""

    def __init__(self, directory: Path, table: WeightTable, lora: LoraConfig) -> None:
        """Open an adapter of the table's model.

        Errors: `UserError` for a file that is missing or damaged, and for a factor that is missing,
        unexpected or of another shape.
        """
        self.directory = directory
        self.lora = lora
        self.stored = _open_factors(directory)
        # Layer by layer is asked for, several times if its weight is read in pieces.
        self.factors = lru_cache(maxsize=8)(self._factors)
        self._check(table)

    def _check(self, table: WeightTable) -> None:
        wanted: dict[str, TensorShape] = {}
        for rule in adapters_of_rules(table.exported, self.lora):
            wanted |= rule.hf_shapes
        what = f"an adapter of rank {self.lora.rank} of this model"
        for name in sorted(wanted.keys() - self.stored.keys()):
            raise UserError(f"{self.directory} lacks {name}, which {what} has")
        for name in sorted(self.stored.keys() - wanted.keys()):
            raise UserError(f"{self.directory} holds {name}, which {what} has not")
        for name, shape in wanted.items():
            if self.stored[name].shape != shape:
                raise UserError(
                    f"{self.directory}: {name} has shape {list(self.stored[name].shape)}, but in "
                    f"{what} it has {list(shape)}"
                )

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first factor."""
        return next(iter(self.stored.values())).dtype

    def read(self, rect: Rect) -> Tensor:
        """Read a rectangle of A or B, in the stored dtype, on the CPU."""
        return rect.view(self.stored[rect.tensor].read())

    def is_adapted(self, layer: str) -> bool:
        """True for a layer with an adapter, such as `model.layers.0.self_attn.q_proj`."""
        return f"{layer}.{LORA_A}.weight" in self.stored

    def _factors(self, layer: str) -> tuple[Tensor, Tensor]:
        """Return A, and (alpha / r) B, of a layer, in float64."""
        lora_A = self.stored[f"{layer}.{LORA_A}.weight"].read().double()
        lora_B = self.stored[f"{layer}.{LORA_B}.weight"].read().double()
        return lora_A, lora_B * self.lora.scale


class StoredFactor(NamedTuple):
    """A or B of one layer on disk."""

    shape: TensorShape
    dtype: torch.dtype
    read: Callable[[], Tensor]
    """Reads all of it."""


def _open_factors(directory: Path) -> dict[str, StoredFactor]:
    """Return the factors in a PEFT directory or a checkpoint by their names. Errors: `UserError`
    for a file that is missing or damaged.
    """
    factors = {}
    if is_dist_checkpoint(directory):
        for name, stored in read_metadata(directory).items():
            if _is_factor(name):
                read = partial(_read_chunks, name, stored)
                factors[name] = StoredFactor(stored.shape, stored.dtype, read)
        return factors
    path = directory / ADAPTER_WEIGHTS
    if not path.is_file():
        raise UserError(f"{path} is missing; it holds the weights of a LoRA adapter")
    for name, region in read_regions(path).items():
        read = partial(_read_region, name, region)
        factor = StoredFactor(region.shape, region.dtype, read)
        factors[name.removeprefix(_PREFIX)] = factor
    return factors


def _read_region(name: str, region: Region) -> Tensor:
    values = torch.empty(region.shape, dtype=region.dtype)
    region.copy_rows(0, values, name)
    return values


def _read_chunks(name: str, stored: StoredTensor) -> Tensor:
    values = torch.empty(stored.shape, dtype=stored.dtype)
    for chunk in stored.chunks:
        row, column = chunk.offsets
        num_rows, num_columns = chunk.sizes
        target = values[row : row + num_rows, column : column + num_columns]
        locate(chunk).copy_rows(0, target, name)
    return values


class MergedTensors:
    """The weights of a model with an adapter added: W + (alpha / r) B A where a layer has one.

    It has the methods of `HfTensors`. Sums are computed in float64 and rounded once, as in a run
    that trains the adapter.
    """

    def __init__(
        self,
        base: "HfTensors | MegatronTensors | MergedTensors",
        adapter: StoredAdapter,
        dtype: torch.dtype | None = None,
    ) -> None:
        """dtype: dtype of the model that the adapter was trained on, to which W is cast first;
        None: as stored.
        """
        self._base = base
        self._adapter = adapter
        self._dtype = dtype

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype or self._base.dtype(name)

    def files(self) -> tuple[Path, ...]:
        """Return the files of the weights, each once."""
        return self._base.files()

    def read(self, rect: Rect) -> Tensor:
        """Read a rectangle of an HF tensor on the CPU."""
        values = self._base.read(rect).to(self.dtype(rect.tensor))
        layer = rect.tensor.removesuffix(".weight")
        if self._adapter.is_adapted(layer):
            lora_A, lora_B = self._adapter.factors(layer)
            rows = lora_B[rect.row0 : rect.row1]
            sums = (rows @ lora_A[:, rect.col0 : rect.col1]).add_(values)
            values = sums.to(values.dtype)
        return values

    def copy_rows(self, name: str, start: int, out: Tensor) -> None:
        """Read as many rows as `out` has, from row `start` on, and cast them into it."""
        rect = whole(name, tuple(out.shape)).shift(start, 0)
        out.copy_(self.read(rect))


def _is_factor(name: str) -> bool:
    is_optimizer = name.startswith(("optimizer.", "reference."))
    return not is_optimizer and (f".{LORA_A}." in name or f".{LORA_B}." in name)


def adapter_files(
    tensors: Iterable[tuple[str, Tensor]], config: bytes
) -> dict[str, bytes]:
    """Return the files of a PEFT directory, name -> content.

    tensors: A and B of every layer, by the names of `models/weights/lora.py`. config: the content
    of adapter_config.json.
    """
    named = {}
    for name, tensor in tensors:
        named[_PREFIX + name] = tensor.detach().to("cpu", copy=True).contiguous()
    weights = safetensors.torch.save(named, metadata={"format": "pt"})
    return {ADAPTER_NAME: config, ADAPTER_WEIGHTS: weights}
