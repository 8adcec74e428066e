"""The sizes of published models, from their config.json; for plans, which need no weights."""

from dataclasses import replace

from megatron_opsft.architectures.shape import ModelShape, MoeShape

DISTILL_1_5B = ModelShape(
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
REAL_SHAPES = {
    "DeepSeek-R1-Distill-Qwen-1.5B": DISTILL_1_5B,
    "DeepSeek-R1-Distill-Qwen-7B": replace(
        DISTILL_1_5B,
        hidden_size=3584,
        ffn_size=18944,
        num_heads=28,
        num_kv_heads=4,
        vocab_size=152064,
    ),
    "DeepSeek-R1-Distill-Qwen-32B": replace(
        DISTILL_1_5B,
        num_layers=64,
        hidden_size=5120,
        ffn_size=27648,
        num_heads=40,
        num_kv_heads=8,
        vocab_size=152064,
        norm_eps=1e-5,
        rope_theta=1e6,
    ),
    "Qwen2.5-72B": replace(
        DISTILL_1_5B,
        num_layers=80,
        hidden_size=8192,
        ffn_size=29568,
        num_heads=64,
        num_kv_heads=8,
        vocab_size=152064,
        norm_eps=1e-5,
        rope_theta=1e6,
    ),
    "Qwen3-30B-A3B": ModelShape(
        architecture="Qwen3MoeForCausalLM",
        num_layers=48,
        hidden_size=2048,
        ffn_size=6144,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=151936,
        tied_embeddings=False,
        qkv_bias=False,
        qk_norm=True,
        norm_eps=1e-6,
        max_position_embeddings=40960,
        rope_theta=1e6,
        moe=MoeShape(num_experts=128, top_k=8, ffn_size=768, normalize_top_k=True),
    ),
}
