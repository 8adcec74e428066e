"""Megatron's `TransformerConfig` for a Hugging Face model and for how this run computes it."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig

from megatron_opsft.config import ParallelConfig, TrainConfig
from megatron_opsft.models.architectures.shape import ModelShape, MoeShape
from megatron_opsft.runtime.device import (
    Device,
    has_fused_weight_gradient,
    has_transformer_engine,
)
from megatron_opsft.trainer.loss.loss_memory import CrossEntropy

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def uses_transformer_engine(device: Device, dtype: str) -> bool:
    """Whether the layers are TransformerEngine's: in bfloat16, where it can be imported.

    Not in float32: it multiplies that in TF32 and has no fused attention for it. A float32 run is
    there to be compared, so it takes the modules that a CPU takes.
    """
    return dtype == "bfloat16" and has_transformer_engine(device)


def transformer_config(
    shape: ModelShape,
    *,
    dtype: str,
    parallel: ParallelConfig,
    train: TrainConfig,
    device: Device,
    deterministic: bool = False,
) -> TransformerConfig:
    """Megatron's description of the model and of how this run computes it.

    deterministic: `run.deterministic`, which a CPU is without it.
    """
    params_dtype = DTYPES[dtype]
    with_te = uses_transformer_engine(device, dtype)
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=params_dtype is torch.bfloat16,
        params_dtype=params_dtype,
        pipeline_dtype=params_dtype,
        autocast_dtype=params_dtype,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.expert_tp,
        cp_comm_type="p2p" if parallel.cp > 1 else None,
        sequence_parallel=parallel.sequence_parallel and parallel.tp > 1,
        # Packs differ in length, so pipeline stages tell each other theirs. Megatron accepts that
        # only with this dispatcher, even where there are no experts to dispatch to.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # Interleaved stages of two ranks send to each other in both directions at once: only the
        # one-by-one exchange keeps those messages apart.
        overlap_p2p_comm=parallel.vpp is not None,
        batch_p2p_comm=parallel.vpp is None,
        # Sums of token losses: the one factor of the global batch is applied in `Trainer.step`.
        calculate_per_token_loss=True,
        use_cpu_initialization=not device.is_cuda,
        perform_initialization=False,
        deterministic_mode=deterministic and device.is_cuda,
        gradient_accumulation_fusion=device.is_cuda and has_fused_weight_gradient(),
        bias_activation_fusion=with_te,
        apply_rope_fusion=with_te,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        recompute_granularity=None if train.recompute == "none" else train.recompute,
        recompute_method="uniform" if train.recompute == "full" else None,
        recompute_num_layers=1 if train.recompute == "full" else None,
        # Not Megatron's default, attention alone: flash attention keeps next to nothing.
        recompute_modules=["mlp" if shape.moe is None else "moe"],
        **(_expert_settings(shape.moe, train, grouped=with_te) if shape.moe else {}),
    )


def _expert_settings(
    moe: MoeShape, train: TrainConfig, *, grouped: bool
) -> dict[str, Any]:
    """The part of Megatron's config that a mixture of experts adds.

    The router computes as Hugging Face's: its linear in the model's dtype, its softmax in float32.
    A softmax over the chosen experts' logits alone is the same as dividing their probabilities by
    their sum. Nothing balances the load: on-policy SFT has the one loss.
    """
    return {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.ffn_size,
        "moe_router_topk": moe.top_k,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not moe.normalize_top_k,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": grouped,
        "moe_enable_routing_replay": train.routing_replay,
    }


def describe_parts(
    config: TransformerConfig, loss: CrossEntropy, device: Device
) -> str:
    """Which fast parts this run takes, and why it goes without the others: one line for the log."""
    dtype = "bfloat16" if config.bf16 else "float32"
    with_te = uses_transformer_engine(device, dtype)
    missing = "cannot be imported" if config.bf16 else "is not for float32"
    missing = missing if device.is_cuda else "needs CUDA"
    layers = (
        "TransformerEngine" if with_te else f"plain torch (TransformerEngine {missing})"
    )
    is_fused = with_te or config.gradient_accumulation_fusion
    return (
        f"{device.torch_device}, {dtype}; layers: {layers}; cross-entropy: {loss.kind} "
        f"({loss.reason}); weight gradients: {'fused' if is_fused else 'not fused'}"
    )
