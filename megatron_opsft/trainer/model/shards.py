"""This rank's Megatron parameters, matched with the weight table, for loading, export and weight
sync.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from megatron_opsft.models.weights.filling import ReadRect, fill_shard
from megatron_opsft.models.weights.rules import WeightRule, WeightTable
from megatron_opsft.records import record
from megatron_opsft.runtime.distributed import Layout
from megatron_opsft.runtime.parked import Whereabouts, in_place
from megatron_opsft.trainer.model.lora import (
    Adapter,
    PolicyWeights,
    adapters_of,
    global_names,
)


@record
class ModelShards:
    """The parameters that this rank holds, with their rules."""

    table: WeightTable
    layout: Layout
    parameters: tuple[tuple[WeightRule, Tensor], ...]
    """Each live parameter with its rule, in the order of the model; not those of adapters."""
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    """This rank's LoRA adapters by the Megatron names of their weights; empty without LoRA."""

    @classmethod
    def of(
        cls, models: Sequence[GPTModel], table: WeightTable, layout: Layout
    ) -> "ModelShards":
        """Match the parameters of `models`, this rank's unwrapped chunks; called by every rank.

        Errors: `UserError` for a parameter without a rule, or a rule of this stage without a
        parameter.
        """
        parameters: list[tuple[WeightRule, Tensor]] = []
        adapters = {
            adapter.rules.weight.mcore_name: adapter for adapter in adapters_of(models)
        }
        of_adapters = {
            rule.mcore_name
            for adapter in adapters.values()
            for rule, _ in adapter.factors()
        }
        experts = layout.local_experts(table.num_experts)
        for model in models:
            offset = get_transformer_layer_offset(model.config, vp_stage=model.vp_stage)
            named = {
                global_name: model.get_parameter(name).data
                for global_name, name in global_names(model, experts).items()
            }
            stage = table.stage_rules(
                range(offset, offset + len(model.decoder.layers)),
                has_embedding=model.pre_process,
                has_output=model.post_process,
                experts=experts,
            )
            table.check_mcore_names(named.keys() - of_adapters, stage)
            parameters += [(rule, named[rule.mcore_name]) for rule in stage]
        return cls(
            table=table, layout=layout, parameters=tuple(parameters), adapters=adapters
        )

    @property
    def by_name(self) -> dict[str, Tensor]:
        """Live parameters by Megatron name, with global layer numbers."""
        return {rule.mcore_name: tensor for rule, tensor in self.parameters}

    def policy_weights(self, on_device: Whereabouts = in_place) -> Mapping[str, Tensor]:
        """Return the weights that the policy has, by Megatron name: the parameters, with their
        adapters added when they are asked for. Call it anew after every update.

        on_device: of the parameters while the trainer sleeps, `Offload.on_device`.
        """
        return PolicyWeights(self.by_name, self.adapters, on_device)

    def adapter_factors(self, on_device: Whereabouts = in_place) -> dict[str, Tensor]:
        """Return A and B of this rank's adapters by Megatron name; on_device: as above."""
        factors: dict[str, Tensor] = {}
        for adapter in self.adapters.values():
            for rule, factor in adapter.factors():
                factors[rule.mcore_name] = on_device(factor.detach())
        return factors

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of all parameters."""
        return self.parameters[0][1].dtype

    def fill(self, read: ReadRect) -> None:
        """Overwrite every parameter from HF tensors. Only this rank's slices are read, one at a
        time.
        """
        for rule, parameter in self.parameters:
            shard = self.layout.shard(is_expert=rule.is_expert)
            fill_shard(
                rule, read, parameter, tp_rank=shard.tp_rank, tp_size=shard.tp_size
            )
