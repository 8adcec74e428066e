"""Open the weights of a model, whatever format they are stored in."""

import json
from pathlib import Path

from megatron_opsft.errors import UserError
from megatron_opsft.models.storage.adapter_config import read_adapter_config
from megatron_opsft.models.storage.adapters import MergedTensors, StoredAdapter
from megatron_opsft.models.storage.hf_files import HfTensors, check_checkpoint
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
"""Key in a checkpoint's complete.json: the hash of the model that the run began with."""


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
    option = f"{checkpoint / ADAPTER_NAME}: base_model_name_or_path"
    base_dir = resolve_model(config.base, option=option)
    if check:
        expected = _read_json(checkpoint / COMPLETE).get(BASE_SHA256)
        # The run's manifest has the hashes of files that have not changed since.
        manifest = _read_json(checkpoint.parents[1] / "manifest.json")
        hashes = hash_model_files(base_dir, manifest.get("model_files", {}))
        if expected is not None and combined(hashes) != expected:
            raise UserError(
                f"{option}={config.base} is not the model that the adapter was trained on: its "
                "files have changed; restore them"
            )
    base = open_weights(base_dir, table, check=check)
    adapter = StoredAdapter(checkpoint, table, config.lora)
    return MergedTensors(base, adapter, adapter.dtype)


def _read_json(path: Path) -> JsonObject:
    """Return the object in a JSON file; {} if it cannot be read."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
