"""Open the weights of a model, whatever format they are stored in."""

import json
from pathlib import Path

from megatron_opsft.config.training import LoraConfig, ModelConfig
from megatron_opsft.errors import UserError, log
from megatron_opsft.models.architectures.shape import ModelShape
from megatron_opsft.models.storage.adapter_config import (
    check_same_adapter,
    read_adapter_config,
)
from megatron_opsft.models.storage.adapters import MergedTensors, StoredAdapter
from megatron_opsft.models.storage.carried import carried_regions
from megatron_opsft.models.storage.hf_files import HfTensors, check_checkpoint
from megatron_opsft.models.storage.large_files import Region
from megatron_opsft.models.storage.megatron_files import MegatronTensors
from megatron_opsft.models.storage.model_identity import combined, hash_model_files
from megatron_opsft.models.storage.model_paths import (
    ADAPTER_NAME,
    is_dist_checkpoint,
    resolve_model,
)
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.records import JsonObject
from megatron_opsft.runtime.durable import COMPLETE

StoredWeights = HfTensors | MegatronTensors | MergedTensors

BASE_SHA256 = "base_sha256"
LORA = "lora"
"""Keys in a checkpoint's complete.json: the hash of the model that the run began with, and the
settings of its adapters.
"""


def open_weights(
    model_dir: Path, table: WeightTable, *, check: bool = True
) -> StoredWeights:
    """Open a Hugging Face directory, a Megatron checkpoint, or a checkpoint of a LoRA adapter with
    its base model; no weight is read yet.

    table: the model's, with TransformerEngine's names, which checkpoints use.
    check: True to compare names and shapes of a Hugging Face directory with it, and the base model
    of an adapter with the one that it was trained on; one rank does so.
    Errors: `UserError` naming file and tensor.
    """
    if is_dist_checkpoint(model_dir):
        if (model_dir / ADAPTER_NAME).is_file():
            return _open_adapted(model_dir, table, check=check)
        return MegatronTensors(model_dir, table)
    tensors = HfTensors(model_dir)
    if check:
        check_checkpoint(tensors, table)
    return tensors


def _open_adapted(
    checkpoint: Path, table: WeightTable, *, check: bool
) -> MergedTensors:
    """Open the checkpoint of a run that trains an adapter."""
    config = read_adapter_config(checkpoint, "checkpoint")
    base_dir = base_of(checkpoint)
    complete = _read_json(checkpoint / COMPLETE)
    settings = config.lora.model_dump(mode="json")
    if complete.get(LORA, settings) != settings:
        raise UserError(
            f"{checkpoint / ADAPTER_NAME} has other settings than the run that wrote the "
            "checkpoint; restore it"
        )
    expected = complete.get(BASE_SHA256)
    if check and expected is not None:
        # The run's manifest has the hashes of files that have not changed since.
        run_dir = checkpoint.resolve().parent.parent
        known = _read_json(run_dir / "manifest.json").get("model_files", {})
        if combined(hash_model_files(base_dir, known)) != expected:
            raise UserError(
                f"{checkpoint / ADAPTER_NAME}: base_model_name_or_path={config.base} is not the "
                "model that the adapter was trained on; restore that, or name its place"
            )
    base = open_weights(base_dir, table, check=check)
    adapter = StoredAdapter(checkpoint, table, config.lora)
    return MergedTensors(base, adapter, adapter.dtype)


def open_adapter(
    model: ModelConfig, lora: LoraConfig, shape: ModelShape, *, warns: bool = False
) -> StoredAdapter | None:
    """Open the adapter that a run starts from, `model.adapter`; None if there is none.

    warns: log a warning if it names another model than `model.path`; names of one model may differ.
    Errors: `UserError` for an adapter that does not fit the model or the settings.
    """
    if model.adapter is None:
        return None
    path = Path(model.adapter)
    base = check_same_adapter(lora, path).base
    names = {"", model.path, str(resolve_model(model.path).resolve())}
    if warns and base not in names:
        log.warning(
            "the adapter in model.adapter=%s belongs to %s, says its %s, and model.path is %s: "
            "they should be the same model",
            path,
            base,
            ADAPTER_NAME,
            model.path,
        )
    return StoredAdapter(path, WeightTable(shape, "te"), lora)


def base_of(adapter_dir: Path) -> Path:
    """Return the directory of the model that an adapter belongs to. Errors: `UserError`."""
    config = read_adapter_config(adapter_dir, "adapter")
    option = f"{adapter_dir / ADAPTER_NAME}: base_model_name_or_path"
    if not config.base:
        raise UserError(f"{option} is empty; write the model's directory or hub name")
    base_dir = resolve_model(config.base, option=option)
    if base_dir.resolve() == adapter_dir.resolve():
        raise UserError(
            f"{option} names the adapter itself; write the model's directory"
        )
    return base_dir


def carried_of(model_dir: Path, table: WeightTable) -> dict[str, Region]:
    """Return HF name -> region of the tensors of other parts of a model, such as vision. A
    checkpoint of a LoRA adapter has those of its base model. Errors: `UserError`.
    """
    return carried_regions(directories_of(model_dir)[-1], table)


def directories_of(model_dir: Path) -> list[Path]:
    """Return the directories that a model's weights are read from: its own, and for a checkpoint of
    a LoRA adapter those of its base model. Errors: `UserError`.
    """
    directories = [model_dir]
    while is_dist_checkpoint(model_dir) and (model_dir / ADAPTER_NAME).is_file():
        model_dir = base_of(model_dir)
        directories.append(model_dir)
    return directories


def _read_json(path: Path) -> JsonObject:
    """Return the object in a JSON file; {} if it cannot be read."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
