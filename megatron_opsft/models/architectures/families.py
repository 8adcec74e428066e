"""The supported architectures: rows that Llama's family shares, and each one's own rows and fields.

A new one is an `Architecture` here and a name in `ARCHITECTURES`.
"""

from dataclasses import replace

from megatron_opsft.models.architectures.template import (
    Architecture,
    ShardKind,
    Template,
)

INPUT_NORM = Template(
    "input_layernorm.weight",
    ShardKind.COPY,
    {"input_layernorm.weight": "hidden"},
    te_name="self_attention.linear_qkv.layer_norm_weight",
)

ATTENTION_OUTPUT = Template(
    "self_attention.linear_proj.weight",
    ShardKind.ROW,
    {"self_attn.o_proj.weight": "hidden q"},
)

ATTENTION_ROWS = (
    INPUT_NORM,
    Template(
        "self_attention.linear_qkv.weight",
        ShardKind.QKV,
        {
            "self_attn.q_proj.weight": "q hidden",
            "self_attn.k_proj.weight": "kv hidden",
            "self_attn.v_proj.weight": "kv hidden",
        },
    ),
    ATTENTION_OUTPUT,
)

MLP_ROWS = (
    Template(
        "pre_mlp_layernorm.weight",
        ShardKind.COPY,
        {"post_attention_layernorm.weight": "hidden"},
        te_name="mlp.linear_fc1.layer_norm_weight",
    ),
    Template(
        "mlp.linear_fc1.weight",
        ShardKind.COLUMN,
        {"mlp.gate_proj.weight": "ffn hidden", "mlp.up_proj.weight": "ffn hidden"},
    ),
    Template(
        "mlp.linear_fc2.weight", ShardKind.ROW, {"mlp.down_proj.weight": "hidden ffn"}
    ),
)

LAYER_ROWS = (*ATTENTION_ROWS, *MLP_ROWS)

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
        ShardKind.COLUMN,
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

# Qwen3.5 and 3.6: three of four layers have a gated delta net, the fourth has attention with an
# output gate. The names of the sections are those that Megatron's checkpoints give them.
GATED_QKV = Template(
    "self_attention.linear_qkv.weight",
    ShardKind.GATED_QKV,
    {
        "self_attn.q_proj.weight": "gated_q hidden",
        "self_attn.k_proj.weight": "kv hidden",
        "self_attn.v_proj.weight": "kv hidden",
    },
)

GATED_ATTENTION_ROWS = (INPUT_NORM, GATED_QKV, ATTENTION_OUTPUT, *QK_NORMS)

DELTA_ROWS = (
    INPUT_NORM._replace(te_name="self_attention.in_proj.layer_norm_weight"),
    Template(
        "self_attention.in_proj.weight",
        ShardKind.COLUMN,
        {
            "linear_attn.in_proj_qkv.weight": "query+key+value hidden",
            "linear_attn.in_proj_z.weight": "z hidden",
            "linear_attn.in_proj_b.weight": "beta hidden",
            "linear_attn.in_proj_a.weight": "alpha hidden",
        },
        stored_apart=True,
    ),
    Template(
        "self_attention.conv1d.weight",
        ShardKind.COLUMN,
        {"linear_attn.conv1d.weight": "query+key+value one conv"},
        stored_apart=True,
    ),
    # The value heads' biases and log decays.
    Template(
        "self_attention.dt_bias",
        ShardKind.COLUMN,
        {"linear_attn.dt_bias": "alpha"},
    ),
    Template(
        "self_attention.A_log",
        ShardKind.COLUMN,
        {"linear_attn.A_log": "alpha"},
    ),
    Template(
        "self_attention.out_norm.weight",
        ShardKind.COPY,
        {"linear_attn.norm.weight": "value_head"},
    ),
    Template(
        "self_attention.out_proj.weight",
        ShardKind.ROW,
        {"linear_attn.out_proj.weight": "hidden value"},
    ),
)

QWEN3_5 = Architecture(
    hf_name="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    layer_rows=(*GATED_ATTENTION_ROWS, *MLP_ROWS),
    delta_rows=(*DELTA_ROWS, *MLP_ROWS),
    fixed_fields=(
        ("attention_bias", False),
        ("attn_output_gate", True),
        ("mlp_only_layers", []),
    ),
    defaults={"head_dim": 256},
    carried=("mtp.",),
    zero_centered_norms=True,
    rotary_share=0.25,
    rope_fields=frozenset({"mrope_section", "mrope_interleaved"}),
)

# The language model in a model that also sees; only text is trained and sampled.
QWEN3_5_VISION = replace(
    QWEN3_5,
    hf_name="Qwen3_5ForConditionalGeneration",
    model_type="qwen3_5",
    hf_prefix="model.language_model.",
    nested_in="text_config",
    carried=("mtp.", "model.visual."),
)

# Experts as in Qwen3's mixture, and one that every token uses, with a gate. Published files have
# the experts of a layer stacked in two tensors.
SHARED_EXPERT_ROWS = (
    Template(
        "mlp.shared_experts.gate_weight",
        ShardKind.COPY,
        {"mlp.shared_expert_gate.weight": "one hidden"},
    ),
    Template(
        "mlp.shared_experts.linear_fc1.weight",
        ShardKind.COLUMN,
        {
            "mlp.shared_expert.gate_proj.weight": "shared_ffn hidden",
            "mlp.shared_expert.up_proj.weight": "shared_ffn hidden",
        },
    ),
    Template(
        "mlp.shared_experts.linear_fc2.weight",
        ShardKind.ROW,
        {"mlp.shared_expert.down_proj.weight": "hidden shared_ffn"},
    ),
)

QWEN3_5_MOE = replace(
    QWEN3_5,
    hf_name="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    layer_rows=(*GATED_ATTENTION_ROWS, *ROUTER_ROWS, *SHARED_EXPERT_ROWS),
    delta_rows=(*DELTA_ROWS, *ROUTER_ROWS, *SHARED_EXPERT_ROWS),
    expert_rows=EXPERT_ROWS,
    fixed_fields=(
        *QWEN3_5.fixed_fields,
        ("decoder_sparse_step", 1),
        ("norm_topk_prob", True),  # transformers normalises whatever it says
        ("n_shared_experts", 0),
        ("num_shared_experts", 0),
    ),
    defaults={"head_dim": 256, "norm_topk_prob": True},
    has_shared_expert=True,
    stacks_experts=True,
)

QWEN3_5_MOE_VISION = replace(
    QWEN3_5_MOE,
    hf_name="Qwen3_5MoeForConditionalGeneration",
    model_type="qwen3_5_moe",
    hf_prefix=QWEN3_5_VISION.hf_prefix,
    nested_in=QWEN3_5_VISION.nested_in,
    carried=QWEN3_5_VISION.carried,
)

ARCHITECTURES = {
    architecture.hf_name: architecture
    for architecture in (
        QWEN2,
        QWEN3,
        LLAMA,
        MISTRAL,
        QWEN3_MOE,
        QWEN3_5,
        QWEN3_5_VISION,
        QWEN3_5_MOE,
        QWEN3_5_MOE_VISION,
    )
}
