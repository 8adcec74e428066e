"""Turns Megatron shards into a stream of whole HF tensors on every rank.

It goes parameter by parameter: the shards are gathered over the tensor-parallel group, sent to the
ranks that do not hold them, and merged through the weight table. No rank ever holds more than one
parameter beyond its own shards.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_opsft.models.architectures.template import ShardKind
from megatron_opsft.models.weights.filling import merge_shards
from megatron_opsft.models.weights.rules import WeightRule
from megatron_opsft.models.weights.slicing import shard_shape
from megatron_opsft.runtime.distributed import (
    Layout,
    broadcast_over,
    ranks_by_value,
    tensor_parallel_group,
)


class Exporter:
    """Streams current weights under their HF names, as often as they are wanted."""

    def __init__(
        self,
        rules: Sequence[WeightRule],
        weights_here: Callable[[], Mapping[str, Tensor]],
        layout: Layout,
    ) -> None:
        """Find out which ranks hold which parameters. Collective over the world.

        rules: what is streamed, in this order, the same on every rank. weights_here: returns the
        current parameters of this rank by Megatron name; called for every stream.
        """
        self._layout = layout
        self._rules = rules
        self._weights_here = weights_here
        held = weights_here()
        self._any_weight = next(iter(held.values()))  # for dtype and device
        names_here = tuple(rule.mcore_name for rule in rules if rule.mcore_name in held)
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
        weights = self._weights_here()
        for rule in self._rules:
            gathered = self._gather(rule, weights)
            if rule.kind is ShardKind.VOCABULARY:
                # By far the largest tensors: the shards lie one below the other, so no copy.
                ((name, shape),) = rule.hf_shapes.items()
                yield name, gathered.flatten(0, 1)[: shape[0]]
            else:
                yield from merge_shards(rule, [*gathered]).items()

    def _gather(self, rule: WeightRule, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the shards of all tensor-parallel ranks, [tp_size, *shape of a shard].

        Collective over the world; the result is the same on every rank.
        """
        layout = self._layout
        tp_size = layout.shard(is_expert=rule.is_expert).tp_size
        stage, ep_rank = self._holder[rule.mcore_name]
        shard = weights.get(rule.mcore_name)
        if shard is not None and tp_size == 1:
            gathered = shard[None]
        else:
            shape = (tp_size, *shard_shape(rule, tp_size))
            gathered = self._any_weight.new_empty(shape)
            if shard is not None:
                group = tensor_parallel_group(is_expert=rule.is_expert)
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
