"""Megatron shards -> a stream of whole HF tensors on every rank, in buckets.

A bucket holds consecutive parameters of one pipeline stage: their shards are gathered over the
tensor-parallel group, sent to the other stages, and merged through the weight table. No rank ever
holds more than a bucket beyond its own shards.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_opsft.architectures.template import ShardKind
from megatron_opsft.model.shards import ModelShards
from megatron_opsft.weights.rules import Rule
from megatron_opsft.weights.slicing import merge_shards, shard_shape, whole_tensors

BUCKET_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters that travel together; `owner`: the pipeline stage that holds them."""

    owner: int
    rules: tuple[Rule, ...]


class Exporter:
    """Streams the model's current weights under their HF names; made once, used for every push."""

    def __init__(self, shards: ModelShards, bucket_bytes: int = BUCKET_BYTES) -> None:
        """Collective over the pipeline group: who holds what is exchanged here, once."""
        self._layout = shards.layout
        self._own = {rule.mcore_name: tensor for rule, tensor in shards.parameters}
        first = shards.parameters[0][1]
        self._dtype, self._device = first.dtype, first.device
        names_by_stage: list[list[str]] = [[] for _ in range(self._layout.pp_size)]
        dist.all_gather_object(
            names_by_stage,
            [rule.mcore_name for rule, _ in shards.parameters if not rule.replica],
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
        owner = {name: stage for stage, names in enumerate(names_by_stage) for name in names}
        rules = [rule for rule in shards.table.rules if not rule.replica]
        self._buckets = self._plan(rules, owner, bucket_bytes)

    def _plan(self, rules: list[Rule], owner: dict[str, int], bucket_bytes: int) -> list[Bucket]:
        buckets: list[Bucket] = []
        current: list[Rule] = []
        size = 0
        for rule in rules:
            gathered = self._shard_numel(rule) * self._layout.tp_size * self._dtype.itemsize
            stage = owner[rule.mcore_name]
            if current and (
                size + gathered > bucket_bytes or owner[current[0].mcore_name] != stage
            ):
                buckets.append(Bucket(owner=owner[current[0].mcore_name], rules=tuple(current)))
                current, size = [], 0
            current.append(rule)
            size += gathered
        buckets.append(Bucket(owner=owner[current[0].mcore_name], rules=tuple(current)))
        return buckets

    def _shard_numel(self, rule: Rule) -> int:
        return torch.Size(shard_shape(rule, self._layout.tp_size)).numel()

    @torch.no_grad()
    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Every HF tensor of the model once, in the table's order; dtype and device of the
        parameters.

        A tensor may be a view of a live parameter: copy what is to outlive the next step.
        Collective over the tensor- and pipeline-parallel groups: every rank must consume the whole
        stream.
        """
        for bucket in self._buckets:
            if self._layout.tp_size == self._layout.pp_size == 1:
                for rule in bucket.rules:
                    yield from whole_tensors(rule, self._own[rule.mcore_name])
                continue
            gathered = self._gather(bucket)
            start = 0
            for rule in bucket.rules:
                shape = shard_shape(rule, self._layout.tp_size)
                stop = start + self._shard_numel(rule)
                shards = [flat[start:stop].view(shape) for flat in gathered]
                if len(shards) == 1:
                    yield from whole_tensors(rule, shards[0])
                elif rule.kind is ShardKind.VOCABULARY and len(bucket.rules) == 1:
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
        tp_size, pp_size = self._layout.tp_size, self._layout.pp_size
        owned = bucket.owner == self._layout.pp_rank
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
                dist.all_gather_into_tensor(
                    gathered.view(-1), mine, group=parallel_state.get_tensor_model_parallel_group()
                )
        if pp_size > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            source = dist.get_global_rank(group, bucket.owner)
            dist.broadcast(gathered, src=source, group=group)
        return gathered
