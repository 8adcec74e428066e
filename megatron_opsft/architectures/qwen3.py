"""Qwen3 (dense): Llama's rows plus a norm over each head of q and k."""

from megatron_opsft.architectures.llama import HF, LAYER_ROWS, MCORE
from megatron_opsft.architectures.template import Architecture, ShardKind, Template

QK_NORMS = (
    Template(
        MCORE + "self_attention.q_layernorm.weight",
        ShardKind.COPY,
        ((HF + "self_attn.q_norm.weight", ("head",)),),
    ),
    Template(
        MCORE + "self_attention.k_layernorm.weight",
        ShardKind.COPY,
        ((HF + "self_attn.k_norm.weight", ("head",)),),
    ),
)

QWEN3 = Architecture(
    hf_name="Qwen3ForCausalLM",
    model_type="qwen3",
    layer_rows=(*LAYER_ROWS, *QK_NORMS),
    qkv_bias=False,
    qk_norm=True,
    default_head_dim=128,
    fixed_fields=(("attention_bias", False), ("use_sliding_window", False)),
)
