"""The only place where modules are chosen: TransformerEngine's on CUDA where it is there; elsewhere
Megatron's linear layers with our attention and norm.
"""

from typing import Any, cast

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron_opsft.architectures.shape import ModelShape
from megatron_opsft.model.attention import PackedAttention, RMSNorm
from megatron_opsft.model.transformer_config import uses_transformer_engine
from megatron_opsft.runtime.device import Device


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
    layer = cast(TransformerLayerSubmodules, spec.submodules)
    if shape.moe is not None:
        # The router's product: Megatron 0.16 leaves this name undefined without TransformerEngine,
        # and with it would multiply in TF32.
        router: Any = moe_utils
        router.te_general_gemm = None
        # In a checkpoint Megatron calls a norm as if it were fused into the linear that follows.
        # TransformerEngine's spec fuses none before a router: keep its name here too.
        del layer.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    self_attention = cast(ModuleSpec, layer.self_attention)
    attention = cast(SelfAttentionSubmodules, self_attention.submodules)
    attention.core_attention = PackedAttention
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=RMSNorm)
