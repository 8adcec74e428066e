"""Turns Megatron shards into a stream of whole HF tensors on every rank.

It goes parameter by parameter: the shards are gathered over the tensor-parallel group, sent to the
ranks that do not hold them, and merged through the weight table. No rank ever holds more than one
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
from megatron_opsft.runtime.parked import Whereabouts, in_place
from megatron_opsft.trainer.model.shards import ModelShards


class Exporter:
    """Streams the model's current weights under their HF names. It is made once for a run."""

    def __init__(self, shards: ModelShards, on_device: Whereabouts = in_place) -> None:
        """Find out which ranks hold which parameters. Collective over the world.

        on_device: of the shards while the trainer sleeps, `Offload.on_device`.
        """
        self._on_device = on_device
        self._layout = layout = shards.layout
        self._rules = shards.table.exported
        self._shards = shards.by_name
        names_here = tuple(
            rule.mcore_name for rule, _ in shards.parameters if not rule.replica
        )
        # Megatron name -> (pipeline stage, expert-parallel rank) that holds the parameter. Experts
        # are on this expert-parallel rank alone, other parameters on every rank of the stage.
        self._holder: dict[str, tuple[int, int]] = {}
        holders = ranks_by_value((layout.pp_rank, layout.ep_rank, names_here))
        for stage, ep_rank, names in holders:
            self._holder |= dict.fromkeys(names, (stage, ep_rank))

    @torch.no_grad()
    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every HF tensor of the model once, with its name, in the order of the weight table.

        Dtype and device are those of the parameters. A tensor may be a view of a live parameter:
        copy what is to outlive the next step. Collective over the world: every rank must consume
        the whole stream.
        """
        for rule in self._rules:
            gathered = self._gather(rule)
            if rule.kind is ShardKind.VOCABULARY:
                # By far the largest tensors: the shards lie one below the other, so no copy.
                ((name, shape),) = rule.hf_shapes.items()
                yield name, gathered.flatten(0, 1)[: shape[0]]
            else:
                yield from merge_shards(rule, [*gathered]).items()

    def _gather(self, rule: WeightRule) -> Tensor:
        """Return the shards of all tensor-parallel ranks, [tp_size, *shape of a shard].

        Collective over the world; the result is the same on every rank.
        """
        layout = self._layout
        tp_size = layout.shard(is_expert=rule.is_expert).tp_size
        stage, ep_rank = self._holder[rule.mcore_name]
        shard = self._shards.get(rule.mcore_name)
        if shard is not None:
            shard = self._on_device(shard)
        if shard is not None and tp_size == 1:
            gathered = shard[None]
        else:
            any_shard = next(iter(self._shards.values()))
            gathered = any_shard.new_empty(tp_size, *shard_shape(rule, tp_size))
            if shard is not None:
                group = (
                    parallel_state.get_expert_tensor_parallel_group()
                    if rule.is_expert
                    else parallel_state.get_tensor_model_parallel_group()
                )
                dist.all_gather_into_tensor(
                    gathered.view(-1), shard.flatten(), group=group
                )
        if rule.is_expert and layout.ep_size > 1:
            # The group's ranks are ordered by stage, expert-parallel rank, tensor-parallel rank.
            root = (stage * layout.ep_size + ep_rank) * tp_size
            group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
            return broadcast_over(gathered, root, group)
        if layout.pp_size > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            return broadcast_over(gathered, stage, group)
        return gathered
