"""`config.json` -> ModelShape: both spellings, defaults as in transformers, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import SHAPES
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.config_from_hf import read_model_shape
from megatron_opsft.models.architectures.shape import (
    DeltaShape,
    Llama3Scaling,
    ModelShape,
    MoeShape,
)

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
# As transformers 4 wrote them.
QWEN2: dict[str, Any] = SIZES | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "max_window_layers": 3,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": 128,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}
LLAMA = QWEN2 | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN3 = QWEN2 | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MISTRAL = QWEN2 | {"architectures": ["MistralForCausalLM"], "sliding_window": None}
MOE = QWEN2 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "head_dim": 32,
    "mlp_only_layers": [],
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
HYBRID_TEXT: dict[str, Any] = SIZES | {
    "model_type": "qwen3_5_text",
    "attn_output_gate": True,
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 512,
    "num_hidden_layers": 4,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [1, 2, 1],
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
        "rope_type": "default",
    },
    "tie_word_embeddings": True,
}
HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": HYBRID_TEXT,
    "tie_word_embeddings": True,
    "vision_config": {"depth": 2},
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
    "rope_type": "llama3",
}


def read(directory: Path, config: dict[str, Any], *without: str) -> ModelShape:
    kept = {key: value for key, value in config.items() if key not in without}
    (directory / "config.json").write_text(json.dumps(kept))
    return read_model_shape(directory)


def test_a_config_of_transformers_4(tmp_path: Path) -> None:
    sizes = {"num_layers": 3, "ffn_size": 160, "vocab_size": 300, "max_position_embeddings": 512}
    shape = replace(SHAPES["qwen2"], tied_embeddings=True, norm_eps=1e-5, rope_theta=1e6, **sizes)
    assert read(tmp_path, QWEN2) == shape
    assert read(tmp_path, QWEN2 | {"architectures": None}) == shape  # saved without its model
    moe = read(tmp_path, MOE)
    assert moe.moe == MoeShape(num_experts=8, top_k=2, ffn_size=48, normalize_top_k=True)
    assert (moe.head_dim, moe.qk_norm) == (32, True)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE},
        {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0}},
        {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0}, "rope_scaling": {}},
        {
            "rope_theta": 500000.0,
            "rope_scaling": LLAMA3_ROPE,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        {  # a length beside the settings counts first
            "rope_theta": 500000.0,
            "rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": 64},
            "original_max_position_embeddings": 128,
        },
    ],
)
def test_llama3_rope_in_both_spellings(tmp_path: Path, rope: dict[str, Any]) -> None:
    shape = read(tmp_path, {k: v for k, v in LLAMA.items() if k != "rope_theta"} | rope)
    assert shape.rope_theta == 500000.0
    assert shape.rope_scaling == Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=128
    )


@pytest.mark.parametrize("kind", [Qwen2Config, Qwen3Config, LlamaConfig, MistralConfig])
def test_what_transformers_saves_is_read(tmp_path: Path, kind: type) -> None:
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    saved = kind(**SIZES, rope_parameters=rope, tie_word_embeddings=False, sliding_window=None)
    saved.architectures = [kind.__name__.replace("Config", "ForCausalLM")]
    saved.save_pretrained(tmp_path)
    shape = read_model_shape(tmp_path)
    assert shape.head_dim == (getattr(saved, "head_dim", None) or 16)
    assert (shape.rope_theta, shape.rope_scaling, shape.moe) == (5000.0, None, None)
    assert (shape.vocab_size, shape.tied_embeddings) == (300, False)
    assert shape.norm_eps == saved.rms_norm_eps
    assert shape.qk_norm is (kind is Qwen3Config)


def test_the_experts_that_transformers_saves_are_read(tmp_path: Path) -> None:
    saved = Qwen3MoeConfig(**SIZES, architectures=["Qwen3MoeForCausalLM"])
    saved.save_pretrained(tmp_path)
    expected = MoeShape(num_experts=128, top_k=8, ffn_size=768, normalize_top_k=False)
    assert read_model_shape(tmp_path).moe == expected


def test_defaults_of_absent_fields_are_those_of_transformers(tmp_path: Path) -> None:
    optional = ("num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings")
    shape = read(tmp_path, LLAMA, *optional)
    assert (shape.num_kv_heads, shape.norm_eps, shape.rope_theta) == (4, 1e-6, 10000.0)
    assert shape.tied_embeddings is False
    assert read(tmp_path, QWEN3).head_dim == Qwen3Config().head_dim == 128
    moe = read(tmp_path, MOE, "norm_topk_prob", "head_dim")
    assert moe.moe is not None and moe.moe.normalize_top_k is Qwen3MoeConfig().norm_topk_prob
    assert moe.head_dim == 16
    assert MistralConfig().sliding_window == 4096
    with pytest.raises(UserError, match=r"sliding_window=4096 .* only sliding_window=null"):
        read(tmp_path, MISTRAL, "sliding_window")


def test_a_hybrid_model_in_a_model_that_sees(tmp_path: Path) -> None:
    """Every fourth layer has attention unless the file names the kinds; alone it is the same."""
    shape = read(tmp_path, HYBRID)
    alone = HYBRID_TEXT | {"architectures": ["Qwen3_5ForCausalLM"]}
    assert read(tmp_path, alone) == replace(shape, architecture="Qwen3_5ForCausalLM")
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    assert list(shape.layer_kinds) == kinds
    assert shape.delta == DeltaShape(
        num_key_heads=2, num_value_heads=4, key_head_dim=16, value_head_dim=8, conv_size=4
    )
    assert (shape.rotary_dim, shape.rope_theta, shape.tied_embeddings) == (8, 1e6, True)
    assert shape.gated_attention and shape.zero_centered_norms and shape.qk_norm
    two = read(tmp_path, changed_text({"full_attention_interval": 2}))
    assert list(two.layer_kinds) == ["linear_attention", "full_attention"] * 2
    named = read(tmp_path, changed_text({"layer_types": kinds[::-1]}))
    assert list(named.layer_kinds) == kinds[::-1]
    absent = {"head_dim", "linear_num_value_heads", "rope_parameters"}
    rest = {name: value for name, value in HYBRID_TEXT.items() if name not in absent}
    shape = read(tmp_path, HYBRID | {"text_config": rest})
    assert (shape.head_dim, shape.rotary_dim) == (256, 64)
    assert shape.delta is not None and shape.delta.num_value_heads == 32
    assert read(tmp_path, changed_text({"output_gate_type": "swish"})).delta is not None


def changed_text(change: dict[str, Any]) -> dict[str, Any]:
    """A hybrid model whose language model has these fields."""
    return HYBRID | {"text_config": HYBRID_TEXT | change}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types must be a list of num_hidden_layers=4"),
        ({"layer_types": "full_attention"}, "layer_types must be a list of num_hidden_layers=4"),
        ({"layer_types": ["mamba"] * 4}, "layer_types: mamba is not supported; supported: full_"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types needs a full_attention layer"),
        ({"full_attention_interval": 0}, "full_attention_interval must be a positive whole number"),
        ({"full_attention_interval": 5}, "layer_types needs a full_attention layer"),
        ({"linear_num_key_heads": 3}, "linear_num_key_heads=3 does not divide .*_value_heads=4"),
        ({"linear_key_head_dim": "16"}, 'linear_key_head_dim must be a positive whole .*"16"'),
        ({"attn_output_gate": False}, "attn_output_gate=false is not supported, only .*=true"),
        ({"output_gate_type": "sigmoid"}, 'output_gate_type="sigmoid" is not supported, only silu'),
        ({"attention_bias": True}, "attention_bias=true is not supported"),
        ({"num_experts": 8}, "num_experts=8 is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.*only"),
        ({"head_dim": 20}, r"partial_rotary_factor=0\.25 of the head dimension 20 is 5 numbers"),
    ],
)
def test_settings_of_a_nested_model_are_named_with_its_field(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=rf"config\.json: text_config\..*{message}") as error:
        read(tmp_path, changed_text(change))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("share", [1.5, 0.03, 0])
def test_rotary_positions_turn_a_share_of_a_head_s_pairs(tmp_path: Path, share: float) -> None:
    rope = HYBRID_TEXT["rope_parameters"] | {"partial_rotary_factor": share}
    with pytest.raises(UserError, match=r"text_config\.rope_parameters\.partial_rotary_factor"):
        read(tmp_path, changed_text({"rope_parameters": rope}))


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
        (MOE, {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] .*=\[\]"),
        (MOE, {"num_experts": None}, "num_experts must be a positive whole number"),
        (MOE, {"num_local_experts": 9}, "num_experts and num_local_experts differ"),
        (MOE, {"num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than .*=8"),
        (MOE, {"num_experts_per_tok": 1}, "num_experts_per_tok=1 with norm_topk_prob=true"),
        (LLAMA, {"attention_bias": True}, "attention_bias=true"),
        (QWEN2, {"rope_scaling": {"type": "linear", "factor": 4.0}}, '"linear" .*llama3, yarn'),
        (QWEN2, {"rope_scaling": {"type": "longrope", "long_factor": [1]}}, '"longrope" .*yarn'),
        (QWEN2, {"rope_scaling": {"rope_type": ["yarn"]}}, r'rope_type=\["yarn"\] is not'),
        (
            QWEN2,
            {
                "rope_parameters": {"rope_theta": 1e4},
                "rope_scaling": {"type": "dynamic", "factor": 4},
            },
            r'rope_scaling\.rope_type="dynamic" .*llama3, yarn',
        ),
        (QWEN2, {"rope_scaling": {"type": "default", "mrope_section": [1]}}, "mrope_section"),
        (LLAMA, {"rope_scaling": LLAMA3_ROPE | {"factor": None}}, "factor must be"),
        (LLAMA, {"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 4.0}}, "low_freq_factor"),
        (QWEN2, {"rope_scaling": 4.0}, "rope_scaling must be an object"),
        (QWEN2, {"num_hidden_layers": None}, "num_hidden_layers must be a positive whole"),
        (QWEN2, {"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide .*=4"),
        (QWEN2, {"hidden_size": 66}, "does not divide hidden_size=66"),
        (QWEN2, {"head_dim": 7}, "the head dimension 7 is odd"),
        (QWEN2, {"rope_theta": 0}, "rope_theta must be a positive number"),
        (QWEN2, {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        (QWEN2, {"architectures": ["MixtralForCausalLM"]}, "supported: Qwen2ForCausalLM, Qwen3"),
        (QWEN2, {"architectures": ["Qwen2ForCausalLM"] * 2}, "is not supported"),
        (QWEN2, {"architectures": None, "model_type": "mamba"}, "mamba is not supported"),
        (QWEN2, {"architectures": 3}, "architecture 3 is not supported"),
        (QWEN2, {"layer_types": 3}, "layer_types"),
        (QWEN2, {"num_hidden_layers": 10**30}, "num_hidden_layers must be"),
        (QWEN3, {"layer_types": ["linear_attention"] * 3}, "layer_types is supported only with"),
        (QWEN3, {"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor=0.25"),
        (HYBRID, {"text_config": None}, "text_config must be an object: a Qwen3_5ForConditional"),
        (HYBRID, {"tie_word_embeddings": False}, "tie_word_embeddings and text_config.tie_word_"),
        (HYBRID, {"quantization_config": {"bits": 4}}, "quantization_config=.*null"),
    ],
)
def test_unsupported_settings_name_file_and_field(
    tmp_path: Path, base: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=rf"config\.json: .*{message}") as error:
        read(tmp_path, base | change)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist"),
        ('{"a": ', "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("[]", "not a JSON object"),
    ],
)
def test_missing_or_broken_config(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=rf"config\.json .*{message}"):
        read_model_shape(tmp_path)


def test_a_model_type_that_only_foreign_code_knows_is_refused(tmp_path: Path) -> None:
    mapped = QWEN2 | {"auto_map": {"AutoConfig": "configuration_foreign.ForeignConfig"}}
    assert read(tmp_path, mapped) == read(tmp_path, QWEN2)  # transformers knows this type itself
    with pytest.raises(UserError, match=r"model_type foreign needs the code .* is never run"):
        read(tmp_path, mapped | {"model_type": "foreign"})
