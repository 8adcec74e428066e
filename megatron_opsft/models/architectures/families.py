"""The supported architectures: rows that Llama's family shares, and each one's own rows and fields.

A new one is an `Architecture` here and a name in `ARCHITECTURES`.
"""

from megatron_opsft.models.architectures.template import (
    Architecture,
    ShardKind,
    Template,
)

ATTENTION_ROWS = (
    Template(
        "input_layernorm.weight",
        ShardKind.COPY,
        {"input_layernorm.weight": "hidden"},
        te_name="self_attention.linear_qkv.layer_norm_weight",
    ),
    Template(
        "self_attention.linear_qkv.weight",
        ShardKind.QKV,
        {
            "self_attn.q_proj.weight": "q hidden",
            "self_attn.k_proj.weight": "kv hidden",
            "self_attn.v_proj.weight": "kv hidden",
        },
    ),
    Template(
        "self_attention.linear_proj.weight",
        ShardKind.ROW,
        {"self_attn.o_proj.weight": "hidden q"},
    ),
)

LAYER_ROWS = (
    *ATTENTION_ROWS,
    Template(
        "pre_mlp_layernorm.weight",
        ShardKind.COPY,
        {"post_attention_layernorm.weight": "hidden"},
        te_name="mlp.linear_fc1.layer_norm_weight",
    ),
    Template(
        "mlp.linear_fc1.weight",
        ShardKind.GATE_UP,
        {"mlp.gate_proj.weight": "ffn hidden", "mlp.up_proj.weight": "ffn hidden"},
    ),
    Template(
        "mlp.linear_fc2.weight", ShardKind.ROW, {"mlp.down_proj.weight": "hidden ffn"}
    ),
)

LLAMA = Architecture(
    hf_name="LlamaForCausalLM",
    model_type="llama",
    layer_rows=LAYER_ROWS,
    fixed_fields=(
        ("attention_bias", False),
        ("mlp_bias", False),
        ("pretraining_tp", 1),
    ),
)

# The rows are Llama's. Only models without a sliding window are supported.
MISTRAL = Architecture(
    hf_name="MistralForCausalLM",
    model_type="mistral",
    layer_rows=LAYER_ROWS,
    fixed_fields=(("sliding_window", None),),
    defaults={"sliding_window": 4096},
)

# Qwen2, Qwen2.5 and the R1-Distill-Qwen models: biases on q, k and v.
QKV_BIAS = Template(
    "self_attention.linear_qkv.bias",
    ShardKind.QKV,
    {
        "self_attn.q_proj.bias": "q",
        "self_attn.k_proj.bias": "kv",
        "self_attn.v_proj.bias": "kv",
    },
)

QWEN2 = Architecture(
    hf_name="Qwen2ForCausalLM",
    model_type="qwen2",
    layer_rows=(*LAYER_ROWS, QKV_BIAS),
    fixed_fields=(("use_sliding_window", False), ("use_mrope", False)),
)

# Dense Qwen3 models: a norm over each head of q and k.
QK_NORMS = (
    Template(
        "self_attention.q_layernorm.weight",
        ShardKind.COPY,
        {"self_attn.q_norm.weight": "head"},
    ),
    Template(
        "self_attention.k_layernorm.weight",
        ShardKind.COPY,
        {"self_attn.k_norm.weight": "head"},
    ),
)

QWEN3 = Architecture(
    hf_name="Qwen3ForCausalLM",
    model_type="qwen3",
    layer_rows=(*LAYER_ROWS, *QK_NORMS),
    fixed_fields=(("attention_bias", False), ("use_sliding_window", False)),
    defaults={"head_dim": 128},
)

# A mixture of experts in every layer (Qwen3-30B-A3B): a router, SwiGLU experts. On disk each expert
# has its own tensors; transformers 5 holds them fused in memory and writes them apart again.
ROUTER_ROWS = (
    # No te_name: the router follows this norm, so no layer spec fuses it into a linear layer.
    Template(
        "pre_mlp_layernorm.weight",
        ShardKind.COPY,
        {"post_attention_layernorm.weight": "hidden"},
    ),
    Template(
        "mlp.router.weight", ShardKind.COPY, {"mlp.gate.weight": "experts hidden"}
    ),
)

# The local spec holds the experts as a list of MLPs, Transformer Engine as one grouped linear with
# a numbered weight for each.
EXPERT_ROWS = (
    Template(
        "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        ShardKind.GATE_UP,
        {
            "mlp.experts.{expert}.gate_proj.weight": "expert_ffn hidden",
            "mlp.experts.{expert}.up_proj.weight": "expert_ffn hidden",
        },
        te_name="mlp.experts.linear_fc1.weight{expert}",
    ),
    Template(
        "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        ShardKind.ROW,
        {"mlp.experts.{expert}.down_proj.weight": "hidden expert_ffn"},
        te_name="mlp.experts.linear_fc2.weight{expert}",
    ),
)

QWEN3_MOE = Architecture(
    hf_name="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    layer_rows=(*ATTENTION_ROWS, *QK_NORMS, *ROUTER_ROWS),
    expert_rows=EXPERT_ROWS,
    fixed_fields=(
        ("attention_bias", False),
        ("use_sliding_window", False),
        ("decoder_sparse_step", 1),
        ("mlp_only_layers", []),
        ("shared_expert_intermediate_size", 0),
        ("n_shared_experts", 0),
        ("num_shared_experts", 0),
    ),
)

ARCHITECTURES = {
    architecture.hf_name: architecture
    for architecture in (QWEN2, QWEN3, LLAMA, MISTRAL, QWEN3_MOE)
}
