"""Megatron's GPTModel for a Hugging Face model: this rank's shard of TP x PP.

`layer_spec` is the only place that chooses modules: TransformerEngine's on CUDA if it is installed,
otherwise Megatron's linear layers with our attention and norm. The losses multiply by the output
layer's weight themselves: the model returns hidden states instead of logits.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
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
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import (
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_opsft.config import ParallelConfig
from megatron_opsft.models.architectures.shape import (
    Llama3Scaling,
    ModelShape,
    YarnScaling,
)
from megatron_opsft.models.weights.rules import padded_vocab_size
from megatron_opsft.runtime.device import Device
from megatron_opsft.trainer.model.attention import PackedAttention, RMSNorm
from megatron_opsft.trainer.model.delta_spec import (
    PLAIN_PARTS,
    delta_layer_spec,
    delta_net_spec,
    te_parts,
)
from megatron_opsft.trainer.model.transformer_config import uses_transformer_engine


def scaled_rope_frequencies(shape: ModelShape) -> torch.Tensor:
    """Return the inverse rotary frequencies, float32 [rotary_dim / 2], with the model's scaling.

    Computed here because Megatron fixes three of the four numbers of Llama 3's scaling. YaRN's
    attention factor is in `transformer_config`.
    """
    rotary_dim = shape.rotary_dim or shape.head_dim
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    powers = shape.rope_theta**exponents
    scaling = shape.rope_scaling
    if isinstance(scaling, Llama3Scaling):
        return _llama3_frequencies(1.0 / powers, scaling)
    if isinstance(scaling, YarnScaling):
        return _yarn_frequencies(powers, shape, scaling)
    return 1.0 / powers


def _llama3_frequencies(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position / wavelengths
    spread = scaling.high_freq_factor - scaling.low_freq_factor
    # 0: a long wave, stretched by `factor`; 1: a short wave, unchanged; in between a blend.
    unchanged = ((turns - scaling.low_freq_factor) / spread).clamp(0.0, 1.0)
    return frequencies * (unchanged + (1.0 - unchanged) / scaling.factor)


def _yarn_frequencies(
    powers: Tensor, shape: ModelShape, scaling: YarnScaling
) -> Tensor:
    """Return YaRN's frequencies, in transformers' order of operations: equal to the bit.

    powers: the inverse of the unscaled frequencies, float32 [head_dim / 2].
    """

    def pair_of(turns: float) -> float:
        """Return the pair of a head's numbers, a fraction, that turns as often in the original
        positions.
        """
        per_radian = scaling.original_max_position / (turns * 2 * math.pi)
        return shape.head_dim * math.log(per_radian) / (2 * math.log(shape.rope_theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, shape.head_dim - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(shape.head_dim // 2, dtype=torch.float32)
    # 1: a short wave, unchanged; 0: a long wave, stretched by `factor`; in between a blend.
    unchanged = 1.0 - ((pairs - first) / (last - first)).clamp(0.0, 1.0)
    stretched = 1.0 / (scaling.factor * powers)
    return stretched * (1.0 - unchanged) + 1.0 / powers * unchanged


def build_model(
    shape: ModelShape, config: TransformerConfig, device: Device
) -> list[GPTModel]:
    """Return this rank's model chunks (one, or vpp of them), with uninitialised weights."""
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    vpp = config.virtual_pipeline_model_parallel_size
    vp_stages: Sequence[int | None] = range(vpp) if vpp else [None]
    chunks = []
    for vp_stage in vp_stages:
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=layer_spec(shape, config, device, vp_stage),
            vocab_size=padded_vocab_size(
                shape.vocab_size, config.tensor_model_parallel_size
            ),
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
            rotary_percent=(shape.rotary_dim or shape.head_dim) / shape.head_dim,
            vp_stage=vp_stage,
        )
        # For our own modules; Megatron's are there already.
        chunk.to(device.torch_device)
        for module in chunk.modules():
            # TransformerEngine's GEMMs then add weight gradients directly to the float32 main
            # gradients, without rounding them to bfloat16 first. Not by Megatron's setting
            # `gradient_accumulation_fusion`: with it Megatron's output layer, whose product the
            # losses compute, cannot be built without NVIDIA Apex.
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True
        frequencies = scaled_rope_frequencies(shape)
        chunk.rotary_pos_emb.inv_freq = frequencies.to(device.torch_device)
        mark_tensor_parallel(chunk)
        if not config.sequence_parallel:
            sum_gradients_of_head_norms(chunk)
        chunks.append(chunk)
    return chunks


def mark_tensor_parallel(chunk: GPTModel) -> None:
    """Mark the parameters that are shards; Megatron does so only while it initialises weights.

    Gradient norms count a parameter without the mark only on tensor-parallel rank 0.
    """
    for module in chunk.modules():
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
            axis = 0
        elif isinstance(module, RowParallelLinear):
            axis = 1
        else:
            continue
        if module.weight is not None and not hasattr(
            module.weight, "tensor_model_parallel"
        ):
            set_tensor_model_parallel_attributes(module.weight, True, axis, 1)
    for name, parameter in chunk.named_parameters():
        # TransformerEngine's grouped linears do not mark theirs, nor does Megatron before 0.19:
        # norms then miss the experts of all tensor-parallel ranks except the first.
        if ".experts." in name and not hasattr(parameter, "tensor_model_parallel"):
            axis = 1 if ".linear_fc2." in name else 0
            set_tensor_model_parallel_attributes(parameter, True, axis, 1)


def sum_gradients_of_head_norms(chunk: GPTModel) -> None:
    """Let the gradients of the norms in gated delta nets be summed over tensor-parallel ranks.

    Each rank applies such a norm to its own heads. Megatron sums the gradients of all norms under
    sequence parallelism, and otherwise only of those that it knows: over queries and keys.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    for name, parameter in chunk.named_parameters():
        if name.endswith(".out_norm.weight") and group.size() > 1:
            parameter.register_hook(partial(_summed, group=group))


def _summed(gradient: Tensor, *, group: ProcessGroup) -> Tensor:
    total = gradient.clone()
    torch.distributed.all_reduce(total, group=group)
    return total


def wrap_for_training(
    chunks: list[GPTModel], config: TransformerConfig, parallel: ParallelConfig
) -> list[DistributedDataParallel]:
    """Wrap the chunks for data parallelism, with float32 gradient buffers."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
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
    if parallel.overlap_grad_reduce:
        # Gradients are reduced in the last micro-batch, when they are complete sums.
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync if len(wrapped) > 1 else no_sync[0]
    return wrapped


def layer_spec(
    shape: ModelShape, config: TransformerConfig, device: Device, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Return the choice of modules for each layer of this pipeline stage."""
    if uses_transformer_engine(device, "bfloat16" if config.bf16 else "float32"):
        from megatron.core.extensions.transformer_engine import TENorm

        norm, parts = TENorm, te_parts()
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=shape.qk_norm,
        )
    else:
        norm, parts = RMSNorm, PLAIN_PARTS
        spec = _plain_layer_spec(shape, config)
    delta_spec = spec
    if shape.delta is not None:
        delta_spec = delta_layer_spec(spec, delta_net_spec(config, device, parts))
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    specs = []
    for layer in range(first, first + num_layers):
        is_delta = shape.kind_of(layer) == "linear_attention"
        specs.append(delta_spec if is_delta else spec)
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)


def _plain_layer_spec(shape: ModelShape, config: TransformerConfig) -> ModuleSpec:
    """Return the modules of a layer with attention, without TransformerEngine."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=shape.qk_norm,
        normalization="RMSNorm",
    )
    layer = cast(TransformerLayerSubmodules, spec.submodules)
    if shape.moe is not None:
        # The router's GEMM: Megatron 0.16 leaves this name undefined without TransformerEngine, and
        # with it multiplies in TF32.
        router: Any = moe_utils
        router.te_general_gemm = None
        # In checkpoints Megatron names a norm as if it were fused into the linear layer after it.
        # TransformerEngine's spec fuses none before a router: the norm keeps its own name here too.
        del layer.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    self_attention = cast(ModuleSpec, layer.self_attention)
    attention = cast(SelfAttentionSubmodules, self_attention.submodules)
    attention.core_attention = PackedAttention
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


@contextmanager
def without_output_layer(models: Sequence[GPTModel]) -> Iterator[None]:
    """Let the output layers of these GPTModels return their input while the context lasts."""
    layers = [model.output_layer for model in models if model.post_process]
    for layer in layers:
        # Hides the class's method, which returns (logits, bias).
        layer.forward = lambda hidden, *unused, **options: (hidden, None)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def output_weight(model: GPTModel) -> Tensor:
    """Return this rank's rows of the output layer; model: on the last pipeline stage."""
    weight: Tensor
    if model.share_embeddings_and_output_weights:
        weight = model.shared_embedding_or_output_weight()
    else:
        weight = model.output_layer.weight
    return weight
