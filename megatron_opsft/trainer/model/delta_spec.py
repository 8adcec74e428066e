"""Layers with a gated delta net in Megatron's layer spec: whose module it is, of which parts."""

import copy
from dataclasses import replace
from typing import Any, cast

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron_opsft.runtime.device import Device
from megatron_opsft.trainer.model.attention import RMSNorm
from megatron_opsft.trainer.model.delta_net import DeltaSubmodules, GatedDeltaNet
from megatron_opsft.trainer.model.transformer_config import why_own_delta_net


def not_zero_centered(config: TransformerConfig) -> TransformerConfig:
    """Return the config of a model whose norms multiply by their weight."""
    plain = copy.copy(config)
    plain.layernorm_zero_centered_gamma = False
    return plain


class PlainRMSNorm(RMSNorm):
    """`RMSNorm` that multiplies by its weight, whatever the model's other norms do."""

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any) -> None:
        super().__init__(not_zero_centered(config), *args, **options)


class PlainTENorm:
    """TransformerEngine's norm that multiplies by its weight, whatever the other norms do."""

    def __new__(cls, config: TransformerConfig, *args: Any, **options: Any) -> Any:
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm(not_zero_centered(config), *args, **options)


PLAIN_PARTS = DeltaSubmodules(
    in_proj=ColumnParallelLinear, out_norm=PlainRMSNorm, out_proj=RowParallelLinear
)


def te_parts() -> DeltaSubmodules:
    """Return TransformerEngine's parts; `in_proj` has the norm in front of it, too."""
    from megatron.core.extensions.transformer_engine import (
        TELayerNormColumnParallelLinear,
        TERowParallelLinear,
    )

    return DeltaSubmodules(
        in_proj=TELayerNormColumnParallelLinear,
        out_norm=PlainTENorm,
        out_proj=TERowParallelLinear,
    )


def delta_net_spec(
    config: TransformerConfig, device: Device, parts: DeltaSubmodules
) -> ModuleSpec:
    """Return the gated delta net of these parts: Megatron-Core's module, or our own."""
    module: type = GatedDeltaNet
    if why_own_delta_net(config, device) is None:
        from megatron.core.ssm import gated_delta_net

        module = gated_delta_net.GatedDeltaNet
    return ModuleSpec(module=module, submodules=parts)


def delta_layer_spec(attention_layer: ModuleSpec, delta_net: ModuleSpec) -> ModuleSpec:
    """Return the modules of a layer with this gated delta net in the place of attention.

    Both have TransformerEngine's parts or neither has: the norm is fused into the first linear
    layer of both or of none.
    """
    submodules = cast(TransformerLayerSubmodules, attention_layer.submodules)
    # In checkpoints a norm has the name that it has if it is fused into the layer behind it.
    keys = submodules.sharded_state_dict_keys_map | {
        "input_layernorm.": "self_attention.in_proj.layer_norm_"
    }
    return replace(
        attention_layer,
        submodules=replace(
            submodules, self_attention=delta_net, sharded_state_dict_keys_map=keys
        ),
    )
