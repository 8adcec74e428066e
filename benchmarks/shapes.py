"""Shapes of real models, and small ones made of them."""

from dataclasses import replace

from megatron_opsft.architectures.shape import ModelShape

R1_DISTILL_QWEN_1P5B = ModelShape(
    architecture="Qwen2ForCausalLM",
    num_layers=28,
    hidden_size=1536,
    ffn_size=8960,
    num_heads=12,
    num_kv_heads=2,
    head_dim=128,
    vocab_size=151936,
    tied_embeddings=False,
    qkv_bias=True,
    qk_norm=False,
    norm_eps=1e-6,
    max_position_embeddings=131072,
    rope_theta=10000.0,
)
SHAPES = {
    "46m": replace(
        R1_DISTILL_QWEN_1P5B,
        num_layers=8,
        hidden_size=512,
        ffn_size=1792,
        num_heads=8,
        head_dim=64,
        vocab_size=18432,
    ),
    "1.5b": R1_DISTILL_QWEN_1P5B,
    "7b": replace(
        R1_DISTILL_QWEN_1P5B,
        hidden_size=3584,
        ffn_size=18944,
        num_heads=28,
        num_kv_heads=4,
        vocab_size=152064,
    ),
}
