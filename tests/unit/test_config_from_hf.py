"""`config.json` -> ModelShape: both spellings, defaults as in transformers, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from megatron_opsft.architectures.config_from_hf import read_model_shape
from megatron_opsft.architectures.shape import ModelShape, MoeShape, RopeScaling
from megatron_opsft.errors import UserError

QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 160,
    "max_position_embeddings": 512,
    "max_window_layers": 3,
    "model_type": "qwen2",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 128,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 300,
}
LLAMA = QWEN2 | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
}
MISTRAL = {k: v for k, v in QWEN2.items() if k != "use_sliding_window"} | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": None,
}
QWEN3_MOE = QWEN2 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 32,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
    "rope_type": "llama3",
}


def read(tmp_path: Path, config: dict[str, Any]) -> ModelShape:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_model_shape(tmp_path)


def test_qwen2_of_transformers_4(tmp_path: Path) -> None:
    assert read(tmp_path, QWEN2) == ModelShape(
        architecture="Qwen2ForCausalLM",
        num_layers=3,
        hidden_size=64,
        ffn_size=160,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=300,
        tied_embeddings=True,
        qkv_bias=True,
        qk_norm=False,
        norm_eps=1e-6,
        max_position_embeddings=512,
        rope_theta=1e6,
        rope_scaling=None,
    )


def test_qwen3_moe_of_transformers_4(tmp_path: Path) -> None:
    expected = MoeShape(num_experts=8, top_k=2, ffn_size=48, normalize_top_k=True)
    shape = read(tmp_path, QWEN3_MOE)
    assert (shape.moe, shape.head_dim, shape.qk_norm) == (expected, 32, True)
    absent = {k: v for k, v in QWEN3_MOE.items() if k not in ("norm_topk_prob", "head_dim")}
    shape = read(tmp_path, absent)
    assert shape.moe == replace(expected, normalize_top_k=Qwen3MoeConfig().norm_topk_prob)
    assert shape.head_dim == 16


@pytest.mark.parametrize("rope_field", ["rope_scaling", "rope_parameters"])
def test_llama3_rope_in_both_spellings(tmp_path: Path, rope_field: str) -> None:
    config = {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    if rope_field == "rope_scaling":
        config |= {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE}
    else:
        config |= {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0}}
    shape = read(tmp_path, config)
    assert shape.rope_theta == 500000.0
    assert shape.rope_scaling == RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=128
    )


@pytest.mark.parametrize(
    "config_class", [Qwen2Config, Qwen3Config, LlamaConfig, MistralConfig, Qwen3MoeConfig]
)
def test_what_transformers_saves_is_read(tmp_path: Path, config_class: type) -> None:
    saved = config_class(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=77,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=False,
        sliding_window=None,
    )
    saved.architectures = [config_class.__name__.replace("Config", "ForCausalLM")]
    saved.save_pretrained(tmp_path)
    shape = read_model_shape(tmp_path)
    assert shape.head_dim == (getattr(saved, "head_dim", None) or 16)
    assert (shape.rope_theta, shape.rope_scaling) == (5000.0, None)
    assert (shape.vocab_size, shape.tied_embeddings) == (77, False)
    assert shape.norm_eps == saved.rms_norm_eps
    assert shape.qk_norm is (config_class in (Qwen3Config, Qwen3MoeConfig))
    if config_class is Qwen3MoeConfig:
        assert shape.moe == MoeShape(num_experts=128, top_k=8, ffn_size=768, normalize_top_k=False)
    else:
        assert shape.moe is None


def test_defaults_of_absent_fields_are_those_of_transformers(tmp_path: Path) -> None:
    optional = {"num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings"}
    shape = read(tmp_path, {k: v for k, v in LLAMA.items() if k not in optional})
    assert (shape.num_kv_heads, shape.norm_eps, shape.rope_theta) == (4, 1e-6, 10000.0)
    assert shape.tied_embeddings is False
    qwen3 = QWEN2 | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    assert read(tmp_path, qwen3).head_dim == Qwen3Config().head_dim == 128


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (QWEN2, {"use_sliding_window": True}, "use_sliding_window=true .* only .*=false"),
        (QWEN2, {"hidden_act": "gelu"}, 'hidden_act="gelu" .*"silu"'),
        (QWEN2, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (QWEN2, {"quantization_config": {"bits": 4}}, "quantization_config=.*null"),
        (QWEN2, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (QWEN2, {"transformers_weights": "x"}, "transformers_weights=.*null"),
        (QWEN2, {"num_experts": 8}, "num_experts=8 .*null"),
        (MISTRAL, {"sliding_window": 4096}, "sliding_window=4096 .*null"),
        (QWEN3_MOE, {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] .*=\[\]"),
        (QWEN3_MOE, {"num_experts": None}, "num_experts must be a positive whole number"),
        (QWEN3_MOE, {"num_local_experts": 9}, "num_experts and num_local_experts differ"),
        (QWEN3_MOE, {"num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than .*=8"),
        (QWEN3_MOE, {"num_experts_per_tok": 1}, "num_experts_per_tok=1 with norm_topk_prob=true"),
        (LLAMA, {"attention_bias": True}, "attention_bias=true"),
        (QWEN2, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, '"yarn" .*llama3'),
        (QWEN2, {"rope_scaling": {"type": "default", "mrope_section": [1]}}, "mrope_section"),
        (LLAMA, {"rope_scaling": LLAMA3_ROPE | {"factor": None}}, "factor must be"),
        (LLAMA, {"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 4.0}}, "low_freq_factor"),
        (QWEN2, {"rope_scaling": 4.0}, "rope_scaling must be an object"),
        (QWEN2, {"num_hidden_layers": None}, "num_hidden_layers must be a positive whole"),
        (QWEN2, {"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide .*=4"),
        (QWEN2, {"hidden_size": 66}, "does not divide hidden_size=66"),
        (QWEN2, {"rope_theta": 0}, "rope_theta must be a positive number"),
        (QWEN2, {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    ],
)
def test_unsupported_settings_name_file_and_field(
    tmp_path: Path, base: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=rf"config\.json: .*{message}") as error:
        read(tmp_path, base | change)
    assert "\n" not in str(error.value)


def test_unsupported_architecture_lists_the_supported(tmp_path: Path) -> None:
    for change in (
        {"architectures": ["MixtralForCausalLM"]},
        {"architectures": ["Qwen2ForSequenceClassification"]},
        {"architectures": None, "model_type": "mamba"},
        {"architectures": None, "model_type": None},
    ):
        with pytest.raises(UserError, match="Qwen2ForCausalLM, Qwen3ForCausalLM, LlamaForCausalLM"):
            read(tmp_path, QWEN2 | change)


def test_mistral_without_a_sliding_window_field_has_one(tmp_path: Path) -> None:
    assert MistralConfig().sliding_window == 4096
    absent = {k: v for k, v in MISTRAL.items() if k != "sliding_window"}
    with pytest.raises(
        UserError, match=r"config\.json: sliding_window=4096 .* only sliding_window=null"
    ):
        read(tmp_path, absent)


def test_missing_or_broken_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json does not exist"):
        read_model_shape(tmp_path)
    for text, message in (('{"a": ', "cannot be read as JSON"), ("[]", "is not a JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=rf"config\.json {message}"):
            read_model_shape(tmp_path)
