"""The architectures: what Llama's family shares, and each one's own rows and switches.

A new one is an `Architecture` here and a name in `ARCHITECTURES`.
"""

from megatron_opsft.architectures.template import Architecture, ShardKind, Template

MCORE = "decoder.layers.{layer}."
HF = "model.layers.{layer}."

ATTENTION_ROWS = (
    Template(
        MCORE + "input_layernorm.weight",
        ShardKind.COPY,
        ((HF + "input_layernorm.weight", ("hidden",)),),
        te_name=MCORE + "self_attention.linear_qkv.layer_norm_weight",
    ),
    Template(
        MCORE + "self_attention.linear_qkv.weight",
        ShardKind.QKV,
        (
            (HF + "self_attn.q_proj.weight", ("q", "hidden")),
            (HF + "self_attn.k_proj.weight", ("kv", "hidden")),
            (HF + "self_attn.v_proj.weight", ("kv", "hidden")),
        ),
    ),
    Template(
        MCORE + "self_attention.linear_proj.weight",
        ShardKind.ROW,
        ((HF + "self_attn.o_proj.weight", ("hidden", "q")),),
    ),
)

MLP_ROWS = (
    Template(
        MCORE + "pre_mlp_layernorm.weight",
        ShardKind.COPY,
        ((HF + "post_attention_layernorm.weight", ("hidden",)),),
        te_name=MCORE + "mlp.linear_fc1.layer_norm_weight",
    ),
    Template(
        MCORE + "mlp.linear_fc1.weight",
        ShardKind.GATE_UP,
        (
            (HF + "mlp.gate_proj.weight", ("ffn", "hidden")),
            (HF + "mlp.up_proj.weight", ("ffn", "hidden")),
        ),
    ),
    Template(
        MCORE + "mlp.linear_fc2.weight",
        ShardKind.ROW,
        ((HF + "mlp.down_proj.weight", ("hidden", "ffn")),),
    ),
)

LAYER_ROWS = (*ATTENTION_ROWS, *MLP_ROWS)

LLAMA = Architecture(
    hf_name="LlamaForCausalLM",
    model_type="llama",
    layer_rows=LAYER_ROWS,
    qkv_bias=False,
    qk_norm=False,
    fixed_fields=(("attention_bias", False), ("mlp_bias", False), ("pretraining_tp", 1)),
)

# Llama's rows; only models without a sliding window.
MISTRAL = Architecture(
    hf_name="MistralForCausalLM",
    model_type="mistral",
    layer_rows=LAYER_ROWS,
    qkv_bias=False,
    qk_norm=False,
    # The class attends within a window of 4,096 where the config does not say null.
    null_fields=("sliding_window",),
)

# Qwen2, Qwen2.5 and the R1-Distill-Qwen models: biases on q, k and v.
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

# Dense: a norm over each head of q and k.
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

# A mixture of experts in every layer (Qwen3-30B-A3B): a router, SwiGLU experts. On disk each expert
# has its own tensors; transformers 5 holds them fused in memory and writes them apart again.
ROUTER_ROWS = (
    # No te_name: what follows it is the router, so no layer spec fuses it into a linear.
    Template(
        MCORE + "pre_mlp_layernorm.weight",
        ShardKind.COPY,
        ((HF + "post_attention_layernorm.weight", ("hidden",)),),
    ),
    Template(
        MCORE + "mlp.router.weight",
        ShardKind.COPY,
        ((HF + "mlp.gate.weight", ("experts", "hidden")),),
    ),
)

# The local spec holds the experts as a list of MLPs, Transformer Engine as one grouped linear with
# a numbered weight for each.
EXPERT_ROWS = (
    Template(
        MCORE + "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        ShardKind.GATE_UP,
        (
            (HF + "mlp.experts.{expert}.gate_proj.weight", ("expert_ffn", "hidden")),
            (HF + "mlp.experts.{expert}.up_proj.weight", ("expert_ffn", "hidden")),
        ),
        te_name=MCORE + "mlp.experts.linear_fc1.weight{expert}",
    ),
    Template(
        MCORE + "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        ShardKind.ROW,
        ((HF + "mlp.experts.{expert}.down_proj.weight", ("hidden", "expert_ffn")),),
        te_name=MCORE + "mlp.experts.linear_fc2.weight{expert}",
    ),
)

QWEN3_MOE = Architecture(
    hf_name="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    layer_rows=(*ATTENTION_ROWS, *QK_NORMS, *ROUTER_ROWS),
    expert_rows=EXPERT_ROWS,
    qkv_bias=False,
    qk_norm=True,
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

ARCHITECTURES: dict[str, Architecture] = {
    a.hf_name: a for a in (QWEN2, QWEN3, LLAMA, MISTRAL, QWEN3_MOE)
}
