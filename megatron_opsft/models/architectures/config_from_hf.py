"""Hugging Face `config.json` -> `ModelShape`, refusing whatever would change the mathematics.

Plain JSON: transformers is not needed, and fields it would silently ignore are seen. Both spellings
of the rotary settings are read: `rope_theta` / `rope_scaling`, and transformers 5's
`rope_parameters`.
"""

import json
from pathlib import Path
from typing import Any, TypeVar

from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.families import (
    ARCHITECTURES,
    QK_NORMS,
    QKV_BIAS,
)
from megatron_opsft.models.architectures.shape import ModelShape, MoeShape, RopeScaling
from megatron_opsft.models.architectures.template import Architecture

# Fields whose other values mean a model that is computed differently; absent or null is fine.
FIXED_FIELDS: tuple[tuple[str, object], ...] = (
    ("hidden_act", "silu"),
    ("attention_dropout", 0),
    ("partial_rotary_factor", 1),
    ("attn_logit_softcapping", None),
    ("final_logit_softcapping", None),
    ("logits_soft_cap", None),
    ("quantization_config", None),
    ("n_routed_experts", None),
    ("transformers_weights", None),  # another file than the usual ones
)
N = TypeVar("N", int, float)
EXPERT_COUNT_FIELDS = (
    "num_experts",
    "num_local_experts",
)  # transformers 5 writes the second
LLAMA3_FIELDS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


def read_model_shape(model_dir: Path) -> ModelShape:
    """The shape of the model in a Hugging Face directory.

    UserError, naming the file and the field, for a config.json that is missing, broken or
    incomplete, for an architecture without a table, and for any setting the Megatron model would
    not reproduce.
    """
    path = Path(model_dir) / "config.json"
    config = read_json(path)
    architecture = _architecture(config, path)
    _check_needs_no_foreign_code(config, architecture, path)
    config = {**architecture.defaults, **config}
    for name, value in (*FIXED_FIELDS, *architecture.fixed_fields):
        _check_fixed(config, name, value, path)
    _check_layer_types(config, path)
    hidden_size = _positive(config, "hidden_size", path, int)
    num_heads = _positive(config, "num_attention_heads", path, int)
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise UserError(
            f"{path}: num_attention_heads={num_heads} does not divide hidden_size={hidden_size} "
            "and there is no head_dim"
        )
    # Without the field Llama has as many; where another class has not, no tensor fits.
    num_kv_heads = _positive(config, "num_key_value_heads", path, int, num_heads)
    if num_heads % num_kv_heads:
        raise UserError(
            f"{path}: num_key_value_heads={num_kv_heads} does not divide "
            f"num_attention_heads={num_heads}"
        )
    head_dim = _positive(config, "head_dim", path, int, hidden_size // num_heads)
    if head_dim % 2:
        raise UserError(
            f"{path}: the head dimension {head_dim} is odd, but rotary embedding turns pairs of "
            "numbers; look at head_dim, hidden_size and num_attention_heads"
        )
    rope_theta, rope_scaling = _rope(config, path)
    return ModelShape(
        architecture=architecture.hf_name,
        num_layers=_positive(config, "num_hidden_layers", path, int),
        hidden_size=hidden_size,
        ffn_size=_positive(config, "intermediate_size", path, int),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_positive(config, "vocab_size", path, int),
        tied_embeddings=_bool(config, "tie_word_embeddings", path),
        qkv_bias=QKV_BIAS in architecture.layer_rows,
        qk_norm=QK_NORMS[0] in architecture.layer_rows,
        norm_eps=_positive(config, "rms_norm_eps", path, float, 1e-6),
        max_position_embeddings=_positive(config, "max_position_embeddings", path, int),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        moe=_moe(config, architecture, path),
    )


def _check_layer_types(config: dict[str, Any], path: Path) -> None:
    layer_types = config.get("layer_types") or ["full_attention"]
    if isinstance(layer_types, list) and set(map(str, layer_types)) == {
        "full_attention"
    }:
        return
    raise UserError(
        f"{path}: layer_types is supported only with full_attention in every layer"
    )


def read_json(path: Path) -> dict[str, Any]:
    """A file of a model. Errors: `UserError` where it holds no JSON object."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist: {path.parent} is not a Hugging Face model directory"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a JSON object")
    return config


def _architecture(config: dict[str, Any], path: Path) -> Architecture:
    """By `architectures`, or by `model_type` where a config was saved without its model."""
    names, label = config.get("architectures"), config.get("model_type")
    if names:
        label = names[0] if isinstance(names, list) else names
        found = ARCHITECTURES.get(str(label)) if names == [label] else None
    else:
        found = next((a for a in ARCHITECTURES.values() if a.model_type == label), None)
    if found is None:
        raise UserError(
            f"{path}: architecture {label} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return found


def _check_needs_no_foreign_code(
    config: dict[str, Any], architecture: Architecture, path: Path
) -> None:
    """`UserError` where transformers knows the model type by code beside the weights alone. Such
    code is never run; where the type is known too, transformers' own code is used.
    """
    model_type = config.get("model_type", architecture.model_type)
    if config.get("auto_map") and model_type != architecture.model_type:
        raise UserError(
            f"{path}: model_type {model_type} needs the code that auto_map names, and code that "
            f"comes with a model is never run; if this is a {architecture.hf_name}, set model_type "
            f"to {architecture.model_type} and remove auto_map"
        )


def _check_fixed(
    config: dict[str, Any], name: str, supported: object, path: Path
) -> None:
    value = config.get(name)
    if value is None or value == supported:
        return
    shown = f"{name}={json.dumps(value)} is not supported, only {name}={json.dumps(supported)}"
    raise UserError(f"{path}: {shown}")


def _moe(
    config: dict[str, Any], architecture: Architecture, path: Path
) -> MoeShape | None:
    """The experts of a mixture; a dense architecture must not name any."""
    if not architecture.expert_rows:
        for name in EXPERT_COUNT_FIELDS:
            _check_fixed(config, name, None, path)
        return None
    counts = {
        name: config[name]
        for name in EXPERT_COUNT_FIELDS
        if config.get(name) is not None
    }
    if len(set(counts.values())) > 1:
        raise UserError(f"{path}: {' and '.join(counts)} differ; keep one of them")
    num_experts = _positive(
        counts, next(iter(counts), EXPERT_COUNT_FIELDS[0]), path, int
    )
    top_k = _positive(config, "num_experts_per_tok", path, int)
    normalize_top_k = _bool(config, "norm_topk_prob", path)
    if top_k > num_experts:
        raise UserError(
            f"{path}: num_experts_per_tok={top_k} is more than num_experts={num_experts}"
        )
    if top_k == 1 and normalize_top_k:
        raise UserError(
            f"{path}: num_experts_per_tok=1 with norm_topk_prob=true is not supported: the router "
            "would have no effect on the chosen expert's weight"
        )
    return MoeShape(
        num_experts=num_experts,
        top_k=top_k,
        ffn_size=_positive(config, "moe_intermediate_size", path, int),
        normalize_top_k=normalize_top_k,
    )


def _rope(config: dict[str, Any], path: Path) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary positions; only no scaling and Llama 3's are supported.

    Where both fields are there, `rope_scaling` counts, as in transformers
    (`RotaryEmbeddingConfigMixin.convert_rope_params_to_dict`), unless it is empty.
    """
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    settings = config.get(field)
    settings = {} if settings is None else settings
    if not isinstance(settings, dict):
        raise UserError(
            f"{path}: {field} must be an object, not {json.dumps(settings)}"
        )
    source = settings if settings.get("rope_theta") is not None else config
    theta = _positive(source, "rope_theta", path, float, 10000.0)
    _check_fixed(settings, "partial_rotary_factor", 1, path)

    kind = settings.get("rope_type", settings.get("type", "default"))
    known = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
    if kind == "llama3":
        known |= set(LLAMA3_FIELDS)
    elif kind != "default":
        raise UserError(
            f"{path}: {field}.rope_type={json.dumps(kind)} is not supported; "
            "supported: default (no scaling), llama3"
        )
    unknown = sorted(name for name in settings if name not in known)
    if unknown:
        raise UserError(
            f"{path}: {field}.{unknown[0]} is not supported with rope_type={kind}; remove it or "
            "use another model"
        )
    if kind == "default":
        return theta, None
    factor, low, high = (
        _positive(settings, name, path, float) for name in LLAMA3_FIELDS[:3]
    )
    original = _positive(settings, LLAMA3_FIELDS[3], path, int)
    if low >= high:
        raise UserError(
            f"{path}: {field}.low_freq_factor must be below high_freq_factor"
        )
    return theta, RopeScaling(
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=original,
    )


def _positive(
    config: dict[str, Any],
    name: str,
    path: Path,
    kind: type[N],
    default: N | None = None,
) -> N:
    """A field that is a positive number, a whole one if `kind` is int."""
    value = config.get(name)
    value = default if value is None else value
    if (
        isinstance(value, bool)
        or not isinstance(value, int | kind)
        or not 0 < value < 2**40
    ):
        what = "a positive whole number" if kind is int else "a positive number"
        raise UserError(f"{path}: {name} must be {what}, not {json.dumps(value)}")
    return kind(value)


def _bool(config: dict[str, Any], name: str, path: Path) -> bool:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise UserError(
            f"{path}: {name} must be true or false, not {json.dumps(value)}"
        )
    return bool(value)
