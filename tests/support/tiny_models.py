"""Small models of every architecture; weights and samples depend on names and seeds alone.

Imported by the workers, so transformers is not needed here.
"""

import random
import zlib
from dataclasses import replace

import torch
from torch import Tensor

from megatron_opsft.config import LoraConfig
from megatron_opsft.models.architectures.shape import (
    DeltaShape,
    Llama3Scaling,
    ModelShape,
    MoeShape,
    YarnScaling,
)
from megatron_opsft.models.weights.lora import adapters_of_rules
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.records import Sample

QWEN2 = ModelShape(
    architecture="Qwen2ForCausalLM",
    num_layers=4,
    hidden_size=64,
    ffn_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=301,  # not a multiple of anything: the vocabulary is padded
    tied_embeddings=False,
    qkv_bias=True,
    qk_norm=False,
    norm_eps=1e-6,
    max_position_embeddings=256,
    rope_theta=10000.0,
)
QWEN3_MOE = replace(
    QWEN2,
    architecture="Qwen3MoeForCausalLM",
    qkv_bias=False,
    qk_norm=True,
    head_dim=24,
    moe=MoeShape(num_experts=8, top_k=2, ffn_size=40, normalize_top_k=True),
)
QWEN3 = replace(QWEN2, architecture="Qwen3ForCausalLM", qkv_bias=False, qk_norm=True, head_dim=24)
# The original length is short, so that these short samples reach beyond it. The factor is a given
# one that softens attention: with the paper's, 1.2, rounding to bfloat16 alone, transformers' too,
# moves a gradient of so small a model by 3 %.
YARN = YarnScaling(
    factor=8.0,
    original_max_position=32,
    attention_factor=0.8,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=True,
)
# Of 24 numbers of a head 6 are turned; a value head has 24 numbers, a key head 16.
QWEN3_5 = replace(
    QWEN2,
    architecture="Qwen3_5ForCausalLM",
    num_layers=8,
    qkv_bias=False,
    qk_norm=True,
    head_dim=24,
    rotary_dim=6,
    gated_attention=True,
    zero_centered_norms=True,
    delta=DeltaShape(
        num_key_heads=2, num_value_heads=6, key_head_dim=16, value_head_dim=24, conv_size=4
    ),
    layer_kinds=("linear_attention", "linear_attention", "linear_attention", "full_attention") * 2,
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    architecture="Qwen3_5MoeForCausalLM",
    num_layers=4,
    layer_kinds=QWEN3_5.layer_kinds[:4],
    moe=replace(QWEN3_MOE.moe, shared_ffn_size=56),
)
SHAPES = {
    "qwen2": QWEN2,
    "qwen2_tied": replace(QWEN2, tied_embeddings=True),
    "qwen3": QWEN3,
    "qwen3_yarn": replace(QWEN3, rope_scaling=YARN),
    # The original length is short, so that the scaling changes what these short samples see.
    "llama3": replace(
        QWEN2,
        architecture="LlamaForCausalLM",
        qkv_bias=False,
        rope_scaling=Llama3Scaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32
        ),
    ),
    # At TP 4 the last rank's rows of the padded vocabulary are all padding.
    "llama_mha": replace(
        QWEN2, architecture="LlamaForCausalLM", qkv_bias=False, num_kv_heads=4, vocab_size=257
    ),
    "mistral": replace(QWEN2, architecture="MistralForCausalLM", qkv_bias=False, head_dim=24),
    # The experts are narrower than `ffn_size`, which nothing has; not all are chosen by every pack.
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe_unnormalized": replace(
        QWEN3_MOE, moe=MoeShape(num_experts=6, top_k=3, ffn_size=40, normalize_top_k=False)
    ),
    "qwen3_5": QWEN3_5,
    "qwen3_5_tied": replace(QWEN3_5, tied_embeddings=True),
    # The shared expert is wider than the others.
    "qwen3_5_moe": QWEN3_5_MOE,
}


def rounding(name: str) -> float:
    """The relative difference of two float32 gradients of a model of `SHAPES` that are the same.

    A gated delta net solves systems of up to 64 tokens, which programs round differently.
    """
    return 1e-5 if SHAPES[name].delta is None else 1e-4


def weight(hf_name: str, shape: tuple[int, ...]) -> Tensor:
    """The float32 values of one HF tensor."""
    generator = torch.Generator().manual_seed(zlib.crc32(hf_name.encode()))
    values = torch.randn(shape, generator=generator)
    if "norm" in hf_name:
        return 1.0 + 0.1 * values
    if hf_name.endswith("A_log"):
        return values - 3.0  # states that fade slowly: what is added to one is seen for long
    return 0.1 * values


def weights(name: str) -> dict[str, Tensor]:
    """Every HF tensor of a model of `SHAPES`."""
    shapes = WeightTable(SHAPES[name]).hf_shapes()
    values = {hf_name: weight(hf_name, shape) for hf_name, shape in shapes.items()}
    if SHAPES[name].zero_centered_norms:
        for hf_name in values:
            if hf_name.endswith("norm.weight") and "linear_attn" not in hf_name:
                values[hf_name] -= 1.0
    return values


def adapter_values(name: str, lora: LoraConfig) -> dict[str, Tensor]:
    """A and B of every adapter of a model of `SHAPES`, by HF name; neither is zero."""
    shapes: dict[str, tuple[int, ...]] = {}
    for rule in adapters_of_rules(WeightTable(SHAPES[name]).exported, lora):
        shapes |= rule.hf_shapes
    return {hf_name: weight(hf_name, shape) for hf_name, shape in shapes.items()}


def merged_weights(name: str, lora: LoraConfig) -> dict[str, Tensor]:
    """`weights`, with W + (alpha / r) B A of `adapter_values`, in float64 and rounded."""
    values, adapters = weights(name), adapter_values(name, lora)
    for hf_name, value in values.items():
        layer = hf_name.removesuffix(".weight")
        lora_A = adapters.get(f"{layer}.lora_A.weight")
        if lora_A is not None:
            product = adapters[f"{layer}.lora_B.weight"].double() @ lora_A.double()
            values[hf_name] = (value.double() + lora.alpha / lora.rank * product).float()
    return values


def samples(count: int, vocab_size: int = 257, seed: int = 0) -> list[Sample]:
    """Accepted responses of 1 to 48 tokens after prompts of 1 to 9."""
    draw = random.Random(seed)
    return [
        Sample(
            problem_id=f"p{number // 2}",
            sample_index=number % 2,
            prompt_ids=tuple(draw.randrange(vocab_size) for _ in range(draw.randint(1, 9))),
            response_ids=tuple(draw.randrange(vocab_size) for _ in range(draw.randint(1, 48))),
        )
        for number in range(count)
    ]
