"""adapter_config.json, PEFT's description of a LoRA adapter. Reading it needs no torch."""

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_opsft.config.training import LoraConfig, ModelConfig
from megatron_opsft.errors import UserError, looked_in
from megatron_opsft.models.storage.model_paths import ADAPTER_NAME, TINY_REASONER
from megatron_opsft.records import record

# Keys that change what PEFT makes of A and B, with their values in a plain adapter.
_PLAIN_VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "target_parameters": ([], None),
    "trainable_token_indices": ([], None),
    "layers_to_transform": ([], None),
    "layer_replication": ([], None),
    # The other ways to begin change the base model's weights when PEFT loads the adapter.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", None),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "velora_config": (None,),
    "monteclora_config": (None,),
}


@record
class AdapterConfig:
    """What adapter_config.json says of an adapter."""

    lora: LoraConfig
    base: str
    """The model that it belongs to, a directory or a hub name; "" if the file does not say."""


def read_adapter_config(directory: Path, option: str) -> AdapterConfig:
    """Read the adapter_config.json in `directory`.

    option: the setting that errors name. Errors: `UserError` for a directory without one, and for
    an adapter that is more than A and B on linear layers of attention and MLPs.
    """
    path = directory / ADAPTER_NAME
    if not path.is_file():
        advice = "give the directory of a LoRA adapter"
        if (directory / "adapter" / ADAPTER_NAME).is_file():
            advice = f"give {directory / 'adapter'}"
        raise UserError(
            f"{option}={directory} has no {ADAPTER_NAME}{looked_in(directory)}; {advice}"
        )
    try:
        values = json.loads(path.read_bytes())
        rank, alpha = values["r"], values["lora_alpha"]
        targets = values["target_modules"]
        base = values.get("base_model_name_or_path") or ""
        if not isinstance(base, str):
            raise TypeError("base_model_name_or_path is no text")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(
            f"{path} is not the configuration of a LoRA adapter: {error!r}"
        ) from None
    for key, plain in _PLAIN_VALUES.items():
        if values.get(key, plain[0]) not in plain:
            raise UserError(
                f"{path}: {key}={values[key]!r} is not supported; merge the adapter with PEFT "
                "(merge_and_unload, then save_pretrained) and give the directory of the merged "
                "model as model.path"
            )
    if isinstance(targets, str):
        targets = [targets]
    try:
        lora = LoraConfig(rank=rank, alpha=alpha, targets=tuple(targets))
    except (ValidationError, TypeError):
        raise UserError(
            f"{path}: r={rank!r}, lora_alpha={alpha!r}, target_modules={targets!r}: r and "
            "lora_alpha must be positive numbers, and the modules some of "
            f"{', '.join(LoraConfig().targets)}, by these names"
        ) from None
    return AdapterConfig(lora=lora, base=base)


def adapter_config_json(model: ModelConfig, lora: LoraConfig, model_dir: Path) -> bytes:
    """Return the adapter_config.json of a run's adapter. model_dir: the directory of its model."""
    base = model.path
    if base == TINY_REASONER or Path(base).expanduser().exists():
        base = str(model_dir.resolve())  # else a hub name
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.targets),
        "bias": "none",
        "inference_mode": True,
    }
    return (json.dumps(values, indent=2) + "\n").encode()


def check_same_adapter(lora: LoraConfig, directory: Path) -> AdapterConfig:
    """Check that a run with these settings can start from the adapter in `directory`, and return
    what its adapter_config.json says.

    Errors: `UserError` naming the key that differs, also those of `read_adapter_config`.
    """
    config = read_adapter_config(directory, "model.adapter")
    stored = config.lora
    if not lora.rank:
        raise UserError(
            f"model.adapter={directory} with lora.rank=0: set lora.rank={stored.rank} to train the "
            "adapter further, or merge it first (megatron-opsft convert merge) and set model.path "
            "to the result"
        )
    for key in ("rank", "alpha"):
        ours, theirs = getattr(lora, key), getattr(stored, key)
        if ours != theirs:
            raise UserError(
                f"lora.{key}={ours:g}, but the adapter in model.adapter={directory} has "
                f"{theirs:g}; set lora.{key}={theirs:g}"
            )
    if set(lora.targets) != set(stored.targets):
        raise UserError(
            f"lora.targets={','.join(lora.targets)}, but the adapter in model.adapter={directory} "
            f"has {','.join(stored.targets)}; set lora.targets to that"
        )
    return config
