"""Qwen2, Qwen2.5 and the R1-Distill-Qwen models: Llama's rows plus biases on q, k, v."""

from megatron_opsft.architectures.llama import HF, LAYER_ROWS, MCORE
from megatron_opsft.architectures.template import Architecture, ShardKind, Template

QKV_BIAS = Template(
    MCORE + "self_attention.linear_qkv.bias",
    ShardKind.QKV,
    (
        (HF + "self_attn.q_proj.bias", ("q",)),
        (HF + "self_attn.k_proj.bias", ("kv",)),
        (HF + "self_attn.v_proj.bias", ("kv",)),
    ),
)

QWEN2 = Architecture(
    hf_name="Qwen2ForCausalLM",
    model_type="qwen2",
    layer_rows=(*LAYER_ROWS, QKV_BIAS),
    qkv_bias=True,
    qk_norm=False,
    fixed_fields=(("use_sliding_window", False), ("use_mrope", False)),
)
