"""Rotary positions in a `config.json` -> base and scaling, refusing whatever is not known.

Both spellings are read: `rope_theta` / `rope_scaling`, and transformers 5's `rope_parameters`.
"""

import json
import math

from megatron_opsft.models.architectures.config_fields import Fields
from megatron_opsft.models.architectures.shape import (
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
)
from megatron_opsft.models.architectures.template import Architecture

ORIGINAL_LENGTH = "original_max_position_embeddings"
# Kind of rotary positions -> the settings that it may have.
ROPE_FIELDS: dict[str, set[str]] = {
    "default": set(),
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", ORIGINAL_LENGTH},
    "yarn": {
        "factor",
        ORIGINAL_LENGTH,
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "beta_fast",
        "beta_slow",
        "truncate",
        # DeepSeek-R1-0528-Qwen3-8B has it. Neither transformers nor vLLM 0.32 reads it, so it means
        # nothing here either; earlier versions of vLLM multiplied by it.
        "attn_factor",
    },
}


def read_rope(
    fields: Fields, architecture: Architecture
) -> tuple[float, RopeScaling | None]:
    """Read base and scaling of the rotary positions, and refuse every setting that is not known.

    If both fields are present, `rope_scaling` counts, as in transformers
    (`RotaryEmbeddingConfigMixin.convert_rope_params_to_dict`), unless it is empty.
    """
    settings = _rope_settings(fields)
    values, name = settings.values, settings.prefix.removesuffix(".")
    has_theta = values.get("rope_theta") is not None
    theta = (settings if has_theta else fields).positive("rope_theta", float, 10000.0)
    kind = values.get("rope_type", values.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_FIELDS:
        fields.fail(
            f"{name}.rope_type={json.dumps(kind)} is not supported; "
            "supported: default (no scaling), llama3, yarn"
        )
    known = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
    unknown = sorted(
        values.keys() - known - architecture.rope_fields - ROPE_FIELDS[kind]
    )
    if unknown:
        fields.fail(
            f"{name}.{unknown[0]} is not supported with rope_type={kind}; remove it or "
            "use another model"
        )
    if kind == "llama3":
        return theta, _read_llama3(fields, settings)
    if kind == "yarn":
        if theta <= 1:
            fields.fail(f"rope_theta must be above 1 with rope_type=yarn, not {theta}")
        return theta, _read_yarn(fields, settings)
    return theta, None


def _rope_settings(fields: Fields) -> Fields:
    name = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    values = fields.values.get(name)
    if values is None:
        values = {}
    name = fields.prefix + name
    if not isinstance(values, dict):
        fields.fail(f"{name} must be an object, not {json.dumps(values)}")
    return Fields(fields.path, values, f"{name}.")


def read_rotary_dim(
    fields: Fields, architecture: Architecture, head_dim: int
) -> int | None:
    """Read how many of a head's numbers rotary positions turn, the first ones; None: all."""
    name = "partial_rotary_factor"
    settings = _rope_settings(fields)
    if architecture.rotary_share is None:
        fields.check_fixed(name, 1)
        settings.check_fixed(name, 1)
        return None
    default = fields.positive(name, float, architecture.rotary_share)
    share = settings.positive(name, float, default)
    rotary_dim = int(head_dim * share)
    if share > 1 or rotary_dim < 2 or rotary_dim % 2:
        settings.fail(
            f"{settings.prefix}{name}={share} of the head dimension {head_dim} is {rotary_dim} "
            f"numbers, but rotary positions turn pairs: it must be even and at most {head_dim}"
        )
    return None if rotary_dim == head_dim else rotary_dim


def _original_length(
    fields: Fields, settings: Fields, default: int | None = None
) -> int:
    """Read how many positions the model was trained for without scaling. The field beside the
    rotary settings wins over the one inside, as in transformers' `standardize_rope_params`.
    """
    is_beside = fields.values.get(ORIGINAL_LENGTH) is not None
    return (fields if is_beside else settings).positive(ORIGINAL_LENGTH, int, default)


def _read_llama3(fields: Fields, settings: Fields) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=settings.positive("factor", float),
        low_freq_factor=settings.positive("low_freq_factor", float),
        high_freq_factor=settings.positive("high_freq_factor", float),
        original_max_position=_original_length(fields, settings),
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        settings.fail(
            f"{settings.prefix}low_freq_factor must be below high_freq_factor"
        )
    return scaling


def _read_yarn(fields: Fields, settings: Fields) -> YarnScaling:
    """Read YaRN's settings, with the defaults that transformers and vLLM have."""
    for name in ("factor", ORIGINAL_LENGTH, "beta_fast", "beta_slow", "truncate"):
        if name in settings.values and settings.values[name] is None:
            settings.fail(
                f"{settings.prefix}{name} is null, which engines do not take for absent; give it a "
                "value"
            )
    factor = settings.positive("factor", float)
    if factor < 1:
        settings.fail(f"{settings.prefix}factor must be at least 1, not {factor}")
    length = fields.positive("max_position_embeddings", int)
    original = _original_length(fields, settings, default=length)
    if length > math.ceil(factor * original):
        fields.fail(
            f"max_position_embeddings={length} is more than {settings.prefix}factor={factor} times "
            f"{ORIGINAL_LENGTH}={original}, where vLLM's positions end; lower it or raise factor"
        )
    scaling = YarnScaling(
        factor=factor,
        original_max_position=original,
        attention_factor=_yarn_attention_factor(settings, factor),
        beta_fast=settings.positive("beta_fast", float, 32.0),
        beta_slow=settings.positive("beta_slow", float, 1.0),
        truncate=settings.flag("truncate", default=True),
    )
    if scaling.beta_fast < scaling.beta_slow:
        settings.fail(
            f"{settings.prefix}beta_fast={scaling.beta_fast} must not be below "
            f"beta_slow={scaling.beta_slow}"
        )
    return scaling


def _yarn_attention_factor(settings: Fields, factor: float) -> float:
    """Return `YarnScaling.attention_factor`: the config's own; else, if it has both, the magnitude
    of `mscale` over that of `mscale_all_dim`; else the paper's.
    """
    given = settings.positive_or_none("attention_factor")
    if given is not None:
        return given
    numerator = settings.positive_or_none("mscale")
    denominator = settings.positive_or_none("mscale_all_dim")
    if numerator is None or denominator is None:
        return _yarn_magnitude(factor, 1.0)
    return _yarn_magnitude(factor, numerator) / _yarn_magnitude(factor, denominator)


def _yarn_magnitude(factor: float, mscale: float) -> float:
    """Return 0.1 mscale ln(factor) + 1; with mscale 1 it is the paper's sqrt(1/t)."""
    return 0.1 * mscale * math.log(factor) + 1.0
