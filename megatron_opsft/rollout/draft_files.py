"""What `rollout.draft_model` names, judged by its config.json before any engine is started: an
EAGLE head for the model that is trained, or a reason why it is none.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_opsft.architectures.shape import ModelShape
from megatron_opsft.errors import UserError

# Fields that count the layers of multi-token prediction.
_MTP_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_LAYERS_FIELD = "eagle_aux_hidden_state_layer_ids"


def check_draft(directory: Path, shape: ModelShape | None) -> str:
    """vLLM's name for the kind of draft: "eagle3" or "eagle".

    shape: of the model that is trained; None where it is not known yet.
    Errors: `UserError` where no draft model is there, or it is one for another model.
    """
    config = _read_config(directory)
    kind = _kind_of(directory, config)
    if shape is not None:
        _check_sizes(directory, config, shape)
        if kind == "eagle3":
            _check_layers(directory, config, shape)
    return kind


def _read_config(directory: Path) -> Mapping[str, Any]:
    file = directory / "config.json"
    if not file.is_file():
        what = "it has no config.json" if directory.is_dir() else "there is no such directory"
        raise UserError(
            f"rollout.draft_model={directory}: {what}; give the directory of an EAGLE-3 head"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"rollout.draft_model: {file} is no JSON ({error}); restore it") from error
    if not isinstance(config, dict):
        raise UserError(f"rollout.draft_model: {file} holds no JSON object; restore it")
    return config


def _kind_of(directory: Path, config: Mapping[str, Any]) -> str:
    names = [str(name) for name in config.get("architectures") or ["none"]]
    if any("MTP" in name for name in names) or any(config.get(field) for field in _MTP_FIELDS):
        raise UserError(
            f"rollout.draft_model={directory}: it drafts by multi-token prediction (MTP), which "
            "none of the architectures that can be trained here has; give an EAGLE-3 head"
        )
    if names[0].startswith("Eagle3") or names[0].endswith("Eagle3"):
        return "eagle3"
    if names[0].startswith("Eagle"):
        return "eagle"
    raise UserError(
        f"rollout.draft_model={directory}: its architecture {names[0]} is no EAGLE draft model; "
        "give an EAGLE-3 head (such as LlamaForCausalLMEagle3), or name it so in its config.json "
        "if it is one (EagleLlamaForCausalLM for an older EAGLE head)"
    )


def _check_sizes(directory: Path, config: Mapping[str, Any], shape: ModelShape) -> None:
    hidden = config.get("target_hidden_size", config.get("hidden_size"))
    for name, found, wanted in (
        ("hidden size", hidden, shape.hidden_size),
        ("vocabulary", config.get("vocab_size"), shape.vocab_size),
    ):
        if found != wanted:
            raise UserError(
                f"rollout.draft_model={directory}: it was made for a model with {name} {found}, "
                f"and this one's is {wanted}; give a draft of this model"
            )


def _check_layers(directory: Path, config: Mapping[str, Any], shape: ModelShape) -> None:
    """EAGLE-3 reads the hidden states before some of the model's layers."""
    nested = config.get("eagle_config") or {}
    given = config.get(_LAYERS_FIELD) or nested.get(_LAYERS_FIELD)
    # vLLM's choice where the draft names none.
    read = given or (2, shape.num_layers // 2, shape.num_layers - 3)
    if len(set(read)) < len(read) or not all(0 <= n <= shape.num_layers for n in read):
        raise UserError(
            f"rollout.draft_model={directory}: it reads the hidden states of layers {list(read)} "
            f"of a model with {shape.num_layers}; name as many different ones as it was trained on "
            f"in its config.json ({_LAYERS_FIELD})"
        )
