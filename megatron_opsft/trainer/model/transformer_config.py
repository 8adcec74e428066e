"""Megatron's `TransformerConfig`: a Hugging Face model, and how this run computes it."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig

from megatron_opsft.config import ParallelConfig, TrainConfig
from megatron_opsft.models.architectures.shape import (
    DeltaShape,
    LayerKind,
    ModelShape,
    MoeShape,
    YarnScaling,
)
from megatron_opsft.runtime.device import (
    Device,
    has_fused_weight_gradient,
    has_transformer_engine,
    why_no_delta_kernels,
)
from megatron_opsft.trainer.loss.loss_memory import CrossEntropy

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def uses_transformer_engine(device: Device, dtype: str) -> bool:
    """True if the layers are TransformerEngine's: in bfloat16, if it can be imported.

    Not in float32, which it multiplies in TF32 and has no fused attention for. A float32 run exists
    for comparison, so it uses the modules that a CPU uses.
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
    """Return Megatron's description of the model and of how this run computes it.

    deterministic: `run.deterministic`; a CPU always is.
    """
    params_dtype = DTYPES[dtype]
    with_te = uses_transformer_engine(device, dtype)
    settings = _parallel_settings(parallel)
    if train.recompute != "none":
        settings["recompute_granularity"] = train.recompute
    if train.recompute == "full":
        settings["recompute_method"] = "uniform"
        settings["recompute_num_layers"] = 1
    if shape.moe is not None:
        settings |= _expert_settings(shape.moe, train, grouped=with_te)
    if shape.delta is not None:
        settings |= _delta_settings(shape.delta, shape.layer_kinds)
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
        layernorm_zero_centered_gamma=shape.zero_centered_norms,
        attention_output_gate=shape.gated_attention,
        softmax_scale=_softmax_scale(shape),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=params_dtype is torch.bfloat16,
        params_dtype=params_dtype,
        pipeline_dtype=params_dtype,
        autocast_dtype=params_dtype,
        # Losses are sums over tokens; the factor of the global batch is applied in `Trainer.step`.
        calculate_per_token_loss=True,
        use_cpu_initialization=not device.is_cuda,
        perform_initialization=False,
        deterministic_mode=deterministic and device.is_cuda,
        gradient_accumulation_fusion=device.is_cuda and has_fused_weight_gradient(),
        bias_activation_fusion=with_te,
        apply_rope_fusion=with_te,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        # Not Megatron's default, attention: flash attention saves almost nothing anyway.
        recompute_modules=["mlp" if shape.moe is None else "moe"],
        **settings,
    )


def _softmax_scale(shape: ModelShape) -> float | None:
    """Return what attention scores are multiplied by; None for Megatron's 1 / sqrt(head_dim).

    transformers and vLLM multiply rotated queries and keys by YaRN's attention factor. Fused rotary
    kernels cannot, and a dot product is bilinear: here its square scales the scores.
    """
    if not isinstance(shape.rope_scaling, YarnScaling):
        return None
    return shape.rope_scaling.attention_factor**2 / math.sqrt(shape.head_dim)


def _parallel_settings(parallel: ParallelConfig) -> dict[str, Any]:
    """Return the part of Megatron's config that depends on the parallel layout."""
    return {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp,
        "context_parallel_size": parallel.cp,
        "cp_comm_type": "p2p",
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.expert_tp,
        "sequence_parallel": parallel.sequence_parallel and parallel.tp > 1,
        # Packs differ in length, so pipeline stages send it along. Megatron allows that only with
        # this dispatcher, even if there are no experts to dispatch to.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        # Two ranks with interleaved stages send to each other at the same time: only separate
        # messages, not batched ones, keep the two directions apart.
        "overlap_p2p_comm": parallel.vpp is not None,
        "batch_p2p_comm": parallel.vpp is None,
    }


def _expert_settings(
    moe: MoeShape, train: TrainConfig, *, grouped: bool
) -> dict[str, Any]:
    """Return the part of Megatron's config that a mixture of experts adds.

    The router computes like Hugging Face's: its linear layer in the model's dtype, its softmax in
    float32. A softmax over the chosen experts' logits alone equals dividing their probabilities by
    the sum of these. Nothing balances the load: there is no other loss than the token losses.
    """
    return {
        "moe_shared_expert_intermediate_size": moe.shared_ffn_size or None,
        "moe_shared_expert_gate": moe.shared_ffn_size > 0,
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


def _delta_settings(
    delta: DeltaShape, layer_kinds: Sequence[LayerKind]
) -> dict[str, Any]:
    """Return the part of Megatron's config that gated delta nets add."""
    return {
        # 1: a layer without attention. Megatron's checkpoints then name each layer by itself.
        "linear_attention_freq": [
            int(kind == "linear_attention") for kind in layer_kinds
        ],
        "linear_num_key_heads": delta.num_key_heads,
        "linear_num_value_heads": delta.num_value_heads,
        "linear_key_head_dim": delta.key_head_dim,
        "linear_value_head_dim": delta.value_head_dim,
        "linear_conv_kernel_dim": delta.conv_size,
    }


def why_own_delta_net(config: TransformerConfig, device: Device) -> str | None:
    """Return why gated delta nets are those of `delta_net`; None if they are Megatron-Core's.

    Megatron-Core's is for training in bfloat16: flash-linear-attention's kernels multiply in less
    than float32, and add up in varying order.
    """
    if device.is_cuda and not config.bf16:
        return "flash-linear-attention is not for float32"
    if config.deterministic_mode:
        return "flash-linear-attention is not deterministic"
    return why_no_delta_kernels(device)


def describe_parts(
    config: TransformerConfig, loss: CrossEntropy, device: Device
) -> str:
    """Return one line for the log: the fast parts that this run uses, and why not the others."""
    dtype = "bfloat16" if config.bf16 else "float32"
    with_te = uses_transformer_engine(device, dtype)
    if with_te:
        layers = "TransformerEngine"
    elif not device.is_cuda:
        layers = "plain torch (TransformerEngine needs CUDA)"
    elif config.bf16:
        layers = "plain torch (TransformerEngine cannot be imported)"
    else:
        layers = "plain torch (TransformerEngine is not for float32)"
    if config.linear_attention_freq:
        why_own = why_own_delta_net(config, device)
        kernels = f"plain torch ({why_own})" if why_own else "flash-linear-attention"
        layers += f"; gated delta nets: {kernels}"
    is_fused = with_te or config.gradient_accumulation_fusion
    return (
        f"{device.torch_device}, {dtype}; layers: {layers}; cross-entropy: {loss.kind} "
        f"({loss.reason}); weight gradients: {'fused' if is_fused else 'not fused'}"
    )
