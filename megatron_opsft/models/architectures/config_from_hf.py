"""Hugging Face `config.json` -> `ModelShape`, refusing whatever would change the mathematics.

The file is read as plain JSON: transformers is not needed, and fields that it would silently ignore
are checked.
"""

import json
from pathlib import Path
from typing import Any, cast, get_args

from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.config_fields import Fields
from megatron_opsft.models.architectures.families import (
    ARCHITECTURES,
    GATED_QKV,
    QK_NORMS,
    QKV_BIAS,
)
from megatron_opsft.models.architectures.rope_from_hf import (
    read_rope,
    read_rotary_dim,
)
from megatron_opsft.models.architectures.shape import (
    DeltaShape,
    LayerKind,
    ModelShape,
    MoeShape,
)
from megatron_opsft.models.architectures.template import Architecture
from megatron_opsft.records import JsonObject

# Fields with another value mean a model that is computed differently; absent or null is fine.
FIXED_FIELDS: tuple[tuple[str, object], ...] = (
    ("hidden_act", "silu"),
    ("attention_dropout", 0),
    ("attn_logit_softcapping", None),
    ("final_logit_softcapping", None),
    ("logits_soft_cap", None),
    ("quantization_config", None),
    ("n_routed_experts", None),
    ("transformers_weights", None),  # another file than the usual ones
)
# transformers 5 writes the second one.
EXPERT_COUNT_FIELDS = ("num_experts", "num_local_experts")


def read_model_shape(model_dir: Path) -> ModelShape:
    """Read the shape of the model in a Hugging Face directory.

    Errors: `UserError`, naming the file and the field, for a config.json that is missing, broken or
    incomplete, for an architecture without a weight table, and for any setting that the Megatron
    model would not reproduce.
    """
    path = model_dir / "config.json"
    whole_config = Fields(path, read_json(path))
    architecture = _find_architecture(whole_config)
    fields = _language_model_fields(whole_config, architecture)
    for name, supported in FIXED_FIELDS:
        whole_config.check_fixed(name, supported)
    for name, supported in (*FIXED_FIELDS, *architecture.fixed_fields):
        fields.check_fixed(name, supported)
    layer_kinds = _read_layer_kinds(fields, architecture)
    hidden_size = fields.positive("hidden_size", int)
    num_heads = fields.positive("num_attention_heads", int)
    if fields.values.get("head_dim") is None and hidden_size % num_heads:
        fields.fail(
            f"num_attention_heads={num_heads} does not divide hidden_size={hidden_size} "
            "and there is no head_dim"
        )
    # If the field is absent, Llama has as many. Where another class has not, no tensor fits.
    num_kv_heads = fields.positive("num_key_value_heads", int, num_heads)
    if num_heads % num_kv_heads:
        fields.fail(
            f"num_key_value_heads={num_kv_heads} does not divide "
            f"num_attention_heads={num_heads}"
        )
    head_dim = fields.positive("head_dim", int, hidden_size // num_heads)
    if head_dim % 2:
        fields.fail(
            f"the head dimension {head_dim} is odd, but rotary embedding turns pairs of "
            "numbers; look at head_dim, hidden_size and num_attention_heads"
        )
    rope_theta, rope_scaling = read_rope(fields, architecture)
    return ModelShape(
        architecture=architecture.hf_name,
        num_layers=len(layer_kinds),
        hidden_size=hidden_size,
        ffn_size=_read_ffn_size(fields, architecture),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=fields.positive("vocab_size", int),
        tied_embeddings=_read_tied(whole_config, fields),
        qkv_bias=QKV_BIAS in architecture.layer_rows,
        qk_norm=QK_NORMS[0] in architecture.layer_rows,
        norm_eps=fields.positive("rms_norm_eps", float, 1e-6),
        max_position_embeddings=fields.positive("max_position_embeddings", int),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        moe=_read_moe(fields, architecture),
        rotary_dim=read_rotary_dim(fields, architecture, head_dim),
        gated_attention=GATED_QKV in architecture.layer_rows,
        zero_centered_norms=architecture.zero_centered_norms,
        delta=_read_delta(fields, architecture),
        layer_kinds=layer_kinds if architecture.delta_rows else (),
    )


def read_json(path: Path) -> JsonObject:
    """Read a JSON file of a model. Errors: `UserError` unless it holds a JSON object."""
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


def language_model_of(config: JsonObject) -> JsonObject:
    """Return the language model's part of a config.json; all of it if it describes nothing else."""
    for architecture in ARCHITECTURES.values():
        part = config.get(architecture.nested_in) if architecture.nested_in else None
        if isinstance(part, dict):
            return part
    return config


def _find_architecture(fields: Fields) -> Architecture:
    """Return the architecture that `architectures` names, or `model_type` in a config that was
    saved without its model.

    Errors: `UserError` for an unknown architecture, and for a `model_type` that needs the code
    which comes with the weights: such code is never run. `auto_map` does no harm if the
    `model_type` is the architecture's own, as transformers then uses its own code.
    """
    names, label = fields.values.get("architectures"), fields.values.get("model_type")
    architecture = None
    if isinstance(names, list) and names:
        label = names[0]
        if len(names) == 1:  # several names: none can be chosen
            architecture = ARCHITECTURES.get(str(label))
    elif names:
        label = names
    else:
        for candidate in ARCHITECTURES.values():
            if candidate.model_type == label:
                architecture = candidate
    if architecture is None:
        fields.fail(
            f"architecture {label} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    model_type = fields.values.get("model_type", architecture.model_type)
    if fields.values.get("auto_map") and model_type != architecture.model_type:
        fields.fail(
            f"model_type {model_type} needs the code that auto_map names, and code that "
            f"comes with a model is never run; if this is a {architecture.hf_name}, set model_type "
            f"to {architecture.model_type} and remove auto_map"
        )
    return architecture


def _language_model_fields(whole_config: Fields, architecture: Architecture) -> Fields:
    """Return the fields of the language model, with the defaults of its class."""
    values: Any = whole_config.values
    prefix = ""
    if architecture.nested_in is not None:
        values = values.get(architecture.nested_in)
        prefix = f"{architecture.nested_in}."
        if not isinstance(values, dict):
            whole_config.fail(
                f"{architecture.nested_in} must be an object: a {architecture.hf_name} has its "
                "language model's configuration there"
            )
    return Fields(whole_config.path, {**architecture.defaults, **values}, prefix)


def _read_tied(whole_config: Fields, fields: Fields) -> bool:
    """Read whether the head is the embedding. A nested configuration may say it too, and must then
    agree: transformers goes by the outer one, vLLM by the inner one.
    """
    name = "tie_word_embeddings"
    tied = whole_config.flag(name)
    if fields.flag(name, default=tied) != tied:
        whole_config.fail(
            f"{name} and {fields.prefix}{name} differ; set both to what the model has"
        )
    return tied


def _read_layer_kinds(
    fields: Fields, architecture: Architecture
) -> tuple[LayerKind, ...]:
    """Read what mixes the tokens of each layer."""
    num_layers = fields.positive("num_hidden_layers", int)
    kinds = fields.values.get("layer_types")
    if not architecture.delta_rows:
        is_list = kinds is None or isinstance(kinds, list)
        if not is_list or set(map(str, kinds or [])) - {"full_attention"}:
            fields.fail(
                "layer_types is supported only with full_attention in every layer"
            )
        attention: LayerKind = "full_attention"
        return (attention,) * num_layers
    if kinds is None:
        interval = fields.positive("full_attention_interval", int, 4)
        kinds = [
            "linear_attention" if (layer + 1) % interval else "full_attention"
            for layer in range(num_layers)
        ]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        fields.fail(
            f"{fields.prefix}layer_types must be a list of num_hidden_layers={num_layers} kinds"
        )
    unknown = sorted(set(map(str, kinds)) - set(get_args(LayerKind)))
    if unknown:
        fields.fail(
            f"{fields.prefix}layer_types: {unknown[0]} is not supported; supported: "
            f"{', '.join(get_args(LayerKind))}"
        )
    if "full_attention" not in kinds:
        fields.fail(f"{fields.prefix}layer_types needs a full_attention layer")
    return tuple(cast(list[LayerKind], kinds))


def _read_ffn_size(fields: Fields, architecture: Architecture) -> int:
    """Read the size of dense feed-forward layers. A mixture of experts, which has none, may leave
    it out.
    """
    if architecture.expert_rows and fields.values.get("intermediate_size") is None:
        return fields.positive("moe_intermediate_size", int)
    return fields.positive("intermediate_size", int)


def _read_delta(fields: Fields, architecture: Architecture) -> DeltaShape | None:
    """Read the sizes of the gated delta nets; None if the architecture has none."""
    if not architecture.delta_rows:
        return None
    delta = DeltaShape(
        num_key_heads=fields.positive("linear_num_key_heads", int, 16),
        num_value_heads=fields.positive("linear_num_value_heads", int, 32),
        key_head_dim=fields.positive("linear_key_head_dim", int, 128),
        value_head_dim=fields.positive("linear_value_head_dim", int, 128),
        conv_size=fields.positive("linear_conv_kernel_dim", int, 4),
    )
    gate = fields.values.get("output_gate_type")
    if gate not in (None, "silu", "swish"):  # which are the same
        fields.fail(
            f"{fields.prefix}output_gate_type={json.dumps(gate)} is not supported, only silu"
        )
    if delta.num_value_heads % delta.num_key_heads:
        fields.fail(
            f"{fields.prefix}linear_num_key_heads={delta.num_key_heads} does not divide "
            f"linear_num_value_heads={delta.num_value_heads}"
        )
    return delta


def _read_moe(fields: Fields, architecture: Architecture) -> MoeShape | None:
    """Read the experts of a mixture. A dense architecture must not name any: None."""
    if not architecture.expert_rows:
        for name in EXPERT_COUNT_FIELDS:
            fields.check_fixed(name, None)
        return None
    names = [
        name for name in EXPERT_COUNT_FIELDS if fields.values.get(name) is not None
    ]
    if len({fields.values[name] for name in names}) > 1:
        fields.fail(f"{' and '.join(names)} differ; keep one of them")
    num_experts = fields.positive((names or EXPERT_COUNT_FIELDS)[0], int)
    top_k = fields.positive("num_experts_per_tok", int)
    normalize_top_k = fields.flag("norm_topk_prob")
    if top_k > num_experts:
        fields.fail(
            f"num_experts_per_tok={top_k} is more than num_experts={num_experts}"
        )
    if top_k == 1 and normalize_top_k:
        fields.fail(
            "num_experts_per_tok=1 with norm_topk_prob=true is not supported: the router "
            "would have no effect on the chosen expert's weight"
        )
    shared_ffn_size = 0
    if architecture.has_shared_expert:
        shared_ffn_size = fields.positive("shared_expert_intermediate_size", int)
    return MoeShape(
        num_experts=num_experts,
        top_k=top_k,
        ffn_size=fields.positive("moe_intermediate_size", int),
        normalize_top_k=normalize_top_k,
        shared_ffn_size=shared_ffn_size,
    )
