"""Megatron shards -> a stream of whole HF tensors on every rank.

Parameter by parameter: its shards are gathered over the tensor-parallel group, sent to the ranks
that do not hold them, and merged through the weight table. No rank ever holds more than one
parameter beyond its own shards.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_opsft.models.architectures.template import ShardKind
from megatron_opsft.models.weights.rules import WeightRule
from megatron_opsft.models.weights.slicing import merge_shards, shard_shape
from megatron_opsft.runtime.distributed import broadcast_over, ranks_by_value
from megatron_opsft.trainer.model.shards import ModelShards


class Exporter:
    """Streams the model's current weights under their HF names; made once."""

    def __init__(self, shards: ModelShards) -> None:
        """Collective over the world: who holds what is exchanged here, once."""
        self._layout = layout = shards.layout
        self._exported, self._own = shards.table.exported, shards.by_name
        first = shards.parameters[0][1]
        self._dtype, self._device = first.dtype, first.device
        held = tuple(
            rule.mcore_name for rule, _ in shards.parameters if not rule.replica
        )
        # Pipeline stage and expert-parallel rank; the latter matters for experts alone.
        self._owner = {
            name: (stage, ep_rank)
            for stage, ep_rank, names in ranks_by_value(
                (layout.pp_rank, layout.ep_rank, held)
            )
            for name in names
        }

    @torch.no_grad()
    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Every HF tensor of the model once, in the table's order; dtype and device of the
        parameters.

        A tensor may be a view of a live parameter: copy what is to outlive the next step.
        Collective over the world: every rank must consume the whole stream.
        """
        for rule in self._exported:
            gathered = self._gather(rule)
            if rule.kind is ShardKind.VOCABULARY:
                # The largest tensors by far: their shards lie one below the other already.
                yield rule.hf_names[0], gathered.flatten(0, 1)[: rule.hf_shapes[0][0]]
            else:
                yield from merge_shards(rule, [*gathered]).items()

    def _gather(self, rule: WeightRule) -> Tensor:
        """The shards of all tensor-parallel ranks, [tp_size, *shape of a shard], on every rank."""
        layout = self._layout
        tp_size = layout.shard(is_expert=rule.is_expert).tp_size
        stage, ep_rank = self._owner[rule.mcore_name]
        owned = stage == layout.pp_rank and (
            not rule.is_expert or ep_rank == layout.ep_rank
        )
        if owned and tp_size == 1:
            gathered = self._own[rule.mcore_name][None]
        else:
            gathered = torch.empty(
                tp_size,
                *shard_shape(rule, tp_size),
                dtype=self._dtype,
                device=self._device,
            )
            if owned:
                group = (
                    parallel_state.get_expert_tensor_parallel_group()
                    if rule.is_expert
                    else parallel_state.get_tensor_model_parallel_group()
                )
                mine = self._own[rule.mcore_name].flatten()
                dist.all_gather_into_tensor(gathered.view(-1), mine, group=group)
        if rule.is_expert and layout.ep_size > 1:
            # One rank of each part of each expert-parallel rank of each stage, in this order.
            group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
            return broadcast_over(
                gathered, (stage * layout.ep_size + ep_rank) * tp_size, group
            )
        if layout.pp_size > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            return broadcast_over(gathered, stage, group)
        return gathered
