"""Qwen3 with a mixture of experts in every layer (Qwen3-30B-A3B): a router, SwiGLU experts.

On disk each expert has its own tensors; transformers 5 holds them fused in memory and writes them
apart again.
"""

from megatron_opsft.architectures.llama import ATTENTION_ROWS, HF, MCORE
from megatron_opsft.architectures.qwen3 import QK_NORMS
from megatron_opsft.architectures.template import Architecture, ShardKind, Template

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
