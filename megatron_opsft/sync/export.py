"""Megatron shards -> a stream of whole HF tensors on every rank, in buckets.

A bucket holds consecutive parameters of one pipeline stage, and of experts those of one
expert-parallel rank: their shards are gathered over the tensor-parallel group, sent to those who do
not hold them, and merged through the weight table. No rank ever holds more than a bucket beyond its
own shards.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_opsft.architectures.template import ShardKind
from megatron_opsft.model.shards import ModelShards
from megatron_opsft.runtime.distributed import broadcast_over, ranks_by_value
from megatron_opsft.weights.rules import Rule
from megatron_opsft.weights.slicing import merge_shards, shard_shape

BUCKET_BYTES = 256 * 2**20


Owner = tuple[int, int]
"""Pipeline stage, and expert-parallel rank: 0 of what all of a stage's ranks hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters that travel together; `owner`: who holds them; all or none are of experts."""

    owner: Owner
    rules: tuple[Rule, ...]

    @property
    def of_experts(self) -> bool:
        return self.rules[0].is_expert


class Exporter:
    """Streams the model's current weights under their HF names; made once, used for every push."""

    def __init__(self, shards: ModelShards, bucket_bytes: int = BUCKET_BYTES) -> None:
        """Collective over the world: who holds what is exchanged here, once."""
        self._layout = layout = shards.layout
        self._own = {rule.mcore_name: tensor for rule, tensor in shards.parameters}
        first = shards.parameters[0][1]
        self._dtype, self._device = first.dtype, first.device
        held = tuple((r.mcore_name, r.is_expert) for r, _ in shards.parameters if not r.replica)
        owner = {
            name: (stage, ep_rank if is_expert else 0)
            for (stage, ep_rank, names) in ranks_by_value((layout.pp_rank, layout.ep_rank, held))
            for name, is_expert in names
        }
        self._buckets = list(self._plan(shards.table.exported, owner, bucket_bytes))

    def _plan(
        self, rules: Sequence[Rule], owner: dict[str, Owner], bucket_bytes: int
    ) -> Iterator[Bucket]:
        for (holder, _), alike in groupby(rules, lambda r: (owner[r.mcore_name], r.is_expert)):
            current: list[Rule] = []
            size = 0
            for rule in alike:
                gathered = self._shard_numel(rule) * self._tp_size(rule) * self._dtype.itemsize
                if current and size + gathered > bucket_bytes:
                    yield Bucket(owner=holder, rules=tuple(current))
                    current, size = [], 0
                current.append(rule)
                size += gathered
            yield Bucket(owner=holder, rules=tuple(current))

    def _tp_size(self, rule: Rule) -> int:
        return self._layout.shard(is_expert=rule.is_expert).tp_size

    def _shard_numel(self, rule: Rule) -> int:
        return torch.Size(shard_shape(rule, self._tp_size(rule))).numel()

    @torch.no_grad()
    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Every HF tensor of the model once, in the table's order; dtype and device of the
        parameters.

        A tensor may be a view of a live parameter: copy what is to outlive the next step.
        Collective over the world: every rank must consume the whole stream.
        """
        layout = self._layout
        for bucket in self._buckets:
            if layout.tp_size == layout.pp_size == layout.ep_size == 1:
                for rule in bucket.rules:
                    yield from merge_shards(rule, [self._own[rule.mcore_name]]).items()
                continue
            gathered = self._gather(bucket)
            start = 0
            for rule in bucket.rules:
                shape = shard_shape(rule, self._tp_size(rule))
                stop = start + self._shard_numel(rule)
                shards = [flat[start:stop].view(shape) for flat in gathered]
                if rule.kind is ShardKind.VOCABULARY and len(bucket.rules) == 1:
                    # The largest tensors by far: their shards lie one below the other already.
                    rows = rule.hf_shapes[0][0]
                    yield rule.hf_names[0], gathered.view(-1, *shape[1:])[:rows]
                else:
                    yield from merge_shards(rule, shards).items()
                start = stop
            del gathered, shards  # before the next bucket is allocated

    def _gather(self, bucket: Bucket) -> Tensor:
        """[tp_size, numel]: the bucket's flattened shards of all tensor-parallel ranks, on every
        rank.
        """
        layout, tp_size = self._layout, self._tp_size(bucket.rules[0])
        stage, ep_rank = bucket.owner
        owned = stage == layout.pp_rank and (not bucket.of_experts or ep_rank == layout.ep_rank)
        mine = None
        if owned:
            parts = [self._own[rule.mcore_name].flatten() for rule in bucket.rules]
            mine = parts[0] if len(parts) == 1 else torch.cat(parts)
        if mine is not None and tp_size == 1:
            gathered = mine[None]
        else:
            numel = sum(self._shard_numel(rule) for rule in bucket.rules)
            gathered = torch.empty(tp_size, numel, dtype=self._dtype, device=self._device)
            if mine is not None:
                group = (
                    parallel_state.get_expert_tensor_parallel_group()
                    if bucket.of_experts
                    else parallel_state.get_tensor_model_parallel_group()
                )
                dist.all_gather_into_tensor(gathered.view(-1), mine, group=group)
        if bucket.of_experts and layout.ep_size > 1:
            # One rank of each part of each expert-parallel rank of each stage, in this order.
            group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
            return broadcast_over(gathered, (stage * layout.ep_size + ep_rank) * tp_size, group)
        if layout.pp_size > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            return broadcast_over(gathered, stage, group)
        return gathered
