"""Megatron's GPTModel for a Hugging Face model, on this rank's part of TP x PP.

The layer spec is the only place where modules are chosen: TransformerEngine's on CUDA where it is
there, Megatron's linear layers with our attention and norm everywhere else.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)

from megatron_opsft.architectures.shape import ModelShape, MoeShape
from megatron_opsft.config import ParallelConfig, TrainConfig
from megatron_opsft.errors import UserError
from megatron_opsft.loss.cross_entropy import CrossEntropy
from megatron_opsft.model.attention import PackedAttention, RMSNorm
from megatron_opsft.runtime.device import Device, has_fused_weight_gradient, has_transformer_engine
from megatron_opsft.weights.rules import padded_vocab_size

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
    recompute: dict[str, Any] = {}
    if train.recompute == "full":
        recompute = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    elif train.recompute == "selective":
        # Not Megatron's default, attention alone: flash attention keeps next to nothing.
        part = "mlp" if shape.moe is None else "moe"
        recompute = {"recompute_granularity": "selective", "recompute_modules": [part]}
    if train.offload_layers:
        recompute |= {"cpu_offloading": True, "cpu_offloading_num_layers": train.offload_layers}
    experts: dict[str, Any] = {}
    if shape.moe is not None:
        experts = _expert_settings(shape.moe, grouped=with_te)
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
        **recompute,
        **experts,
    )


def _expert_settings(moe: MoeShape, *, grouped: bool) -> dict[str, Any]:
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
    }


def describe_parts(config: TransformerConfig, loss: CrossEntropy, device: Device) -> str:
    """Which fast parts this run takes, and why it goes without the others: one line for the log."""
    dtype = "bfloat16" if config.bf16 else "float32"
    if uses_transformer_engine(device, dtype):
        layers = "TransformerEngine"
    else:
        reason = (
            "no CUDA"
            if not device.is_cuda
            else "TransformerEngine cannot be imported"
            if dtype == "bfloat16"
            else "float32 is for comparisons"
        )
        layers = f"plain torch ({reason})"
    fused = [
        name
        for name, there in (
            ("TransformerEngine's layers", uses_transformer_engine(device, dtype)),
            ("Apex", config.gradient_accumulation_fusion),
        )
        if there
    ]
    accumulation = f"fused by {' and '.join(fused)}" if fused else "not fused"
    return (
        f"{device.torch_device}, {dtype}; layers: {layers}; cross-entropy: {loss.method} "
        f"({loss.reason}); weight gradients: {accumulation}"
    )


def layer_spec(
    shape: ModelShape, config: TransformerConfig, device: Device, vp_stage: int | None
) -> ModuleSpec | TransformerBlockSubmodules:
    """Which module does what in each layer of this stage."""
    if uses_transformer_engine(device, "bfloat16" if config.bf16 else "float32"):
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=shape.qk_norm,
        )
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=shape.qk_norm, normalization="RMSNorm"
    )
    layer = spec.submodules
    if shape.moe is not None:
        # The router's product: Megatron 0.16 leaves this name undefined without TransformerEngine,
        # and with it would multiply in TF32.
        router: Any = moe_utils
        router.te_general_gemm = None
        # In a checkpoint Megatron calls a norm as if it were fused into the linear that follows.
        # TransformerEngine's spec fuses none before a router: keep its name here too.
        del layer.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=RMSNorm)


def scaled_rope_frequencies(shape: ModelShape) -> torch.Tensor:
    """Inverse rotary frequencies, float32 [head_dim / 2], scaled as Llama 3 does where it is.

    Computed here because Megatron fixes three of the four numbers of that scaling.
    """
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    frequencies = 1.0 / (shape.rope_theta**exponents)
    scaling = shape.rope_scaling
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position / wavelengths
    spread = scaling.high_freq_factor - scaling.low_freq_factor
    # 0: a long wave, stretched by `factor`; 1: a short wave, kept; between them a blend.
    kept = ((turns - scaling.low_freq_factor) / spread).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


def check_layout(shape: ModelShape, parallel: ParallelConfig) -> None:
    """Errors: `UserError` naming the number that the layout does not divide."""
    for name, value in (
        ("attention heads", shape.num_heads),
        ("key/value heads", shape.num_kv_heads),
        ("feed-forward size", shape.shard_ffn[1]),
    ):
        if value % parallel.tp:
            raise UserError(
                f"parallel.tp={parallel.tp} does not divide the model's {value} {name}; "
                f"use a divisor of {value}"
            )
    if shape.moe is not None and parallel.tp > 1 and not parallel.sequence_parallel:
        raise UserError(
            f"parallel.tp={parallel.tp} with a mixture of experts needs "
            "parallel.sequence_parallel=true"
        )
    stages = parallel.pp * (parallel.vpp or 1)
    if shape.num_layers % stages:
        raise UserError(
            f"parallel.pp={parallel.pp} x vpp={parallel.vpp or 1} does not divide the model's "
            f"{shape.num_layers} layers"
        )
    if parallel.vpp and parallel.pp < 2:
        raise UserError(f"parallel.vpp={parallel.vpp} needs parallel.pp of at least 2")


def check_offload(
    shape: ModelShape, train: TrainConfig, parallel: ParallelConfig, *, with_te: bool
) -> None:
    """Errors: `UserError` where Megatron cannot keep activations in CPU memory as asked."""
    layers = train.offload_layers
    problem = (
        "needs TransformerEngine, on CUDA and in bfloat16"
        if not with_te
        else f"needs parallel.pp=1, which is {parallel.pp}"
        if parallel.pp > 1
        else f"needs train.recompute=none, which is {train.recompute}"
        if train.recompute != "none"
        else f"must be below the model's {shape.num_layers} layers"
        if layers >= shape.num_layers
        else ""
    )
    if layers and problem:
        raise UserError(f"train.offload_layers={layers} {problem}; change it or use 0")


def build_model(shape: ModelShape, config: TransformerConfig, device: Device) -> list[GPTModel]:
    """This rank's model chunks (one, or vpp of them), weights uninitialised."""
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    vpp = config.virtual_pipeline_model_parallel_size
    chunks = []
    for stage in range(vpp or 1):
        vp_stage = stage if vpp else None
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=layer_spec(shape, config, device, vp_stage),
            vocab_size=padded_vocab_size(shape.vocab_size, config.tensor_model_parallel_size),
            max_sequence_length=shape.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(
                ignore_virtual=False, vp_stage=vp_stage
            ),
            post_process=parallel_state.is_pipeline_last_stage(
                ignore_virtual=False, vp_stage=vp_stage
            ),
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="rope",
            rotary_base=shape.rope_theta,
            vp_stage=vp_stage,
        )
        chunk.to(device.torch_device)  # Megatron's own modules are there already
        fuse_weight_gradients(chunk)
        chunk.rotary_pos_emb.inv_freq = scaled_rope_frequencies(shape).to(device.torch_device)
        mark_tensor_parallel(chunk)
        chunks.append(chunk)
    return chunks


def fuse_weight_gradients(chunk: GPTModel) -> None:
    """Let TransformerEngine's layers add weight gradients to the float32 main gradients in the
    products themselves, without rounding them to bfloat16 first.

    Not by Megatron's `gradient_accumulation_fusion`: its own output layer, whose product the losses
    take over, then refuses to be built without NVIDIA Apex.
    """
    for module in chunk.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def mark_tensor_parallel(chunk: GPTModel) -> None:
    """Say which parameters are shards; Megatron does so only while initialising weights.

    Gradient norms count a parameter without the mark on tensor-parallel rank 0 alone.
    """
    for module in chunk.modules():
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
            axis = 0
        elif isinstance(module, RowParallelLinear):
            axis = 1
        else:
            continue
        if module.weight is not None and not hasattr(module.weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(module.weight, True, axis, 1)


def wrap_for_training(
    chunks: list[GPTModel], config: TransformerConfig, parallel: ParallelConfig
) -> list[DistributedDataParallel]:
    """Megatron's data-parallel wrapper with float32 gradient buffers."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather and parallel.overlap_grad_reduce,
        check_for_nan_in_grad=False,
    )
    wrapped = [
        DistributedDataParallel(
            config=config,
            ddp_config=ddp_config,
            module=chunk,
            disable_bucketing=number > 0,
        )
        for number, chunk in enumerate(chunks)
    ]
    if ddp_config.overlap_param_gather:
        # The trainer waits for gathered weights before anyone reads them, a forward pass included.
        for chunk in wrapped:
            chunk.disable_forward_pre_hook(param_sync=False)
    if parallel.overlap_grad_reduce:
        # Gradients travel in the last micro-batch, when they are sums.
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped
