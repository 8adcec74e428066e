"""Llama 3.x, and the rows that every dense decoder of its family shares."""

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
    default_kv_heads_to_heads=True,
    fixed_fields=(("attention_bias", False), ("mlp_bias", False), ("pretraining_tp", 1)),
)
