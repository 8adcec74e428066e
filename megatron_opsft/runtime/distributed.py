"""Process groups of a run, and collectives over them. `Layout` is this rank's place in them."""

import math
from collections.abc import Hashable, Mapping, Sequence
from datetime import timedelta
from itertools import chain
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

from megatron_opsft.config.training import ParallelConfig
from megatron_opsft.records import MicroBatch, record
from megatron_opsft.runtime.device import Device
from megatron_opsft.runtime.exchange import (
    all_gather_bytes,
    digest_of,
    from_bytes,
    route_bytes,
    to_bytes,
)
from megatron_opsft.runtime.job import join_job, leave_job

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@record
class Shard:
    """The tensor-parallel shard of its parameters that a rank holds."""

    tp_rank: int
    """Which shard it holds."""
    tp_size: int
    """Number of shards."""
    copy_rank: int
    """Number of this rank among the ranks that hold the same shard."""
    num_copies: int
    """Number of ranks that hold the same shard."""


@record
class Layout:
    """This rank's place in TP x CP x DP x PP, and in ETP x EP x EDP x PP for experts."""

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int
    cp_rank: int = 0
    cp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    experts: Shard | None = None
    """This rank's shard of each expert; None: experts are sharded like all other parameters, and
    every rank has a shard of every expert.
    """

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_loss_rank(self) -> bool:
        """True if this rank's token losses are to be summed: one rank of a data-parallel replica,
        or with context parallelism one for each slice of its packs.
        """
        return self.pp_rank == self.pp_size - 1 and self.tp_rank == 0

    def first_of_replica(self, dp_rank: int) -> int:
        """Return the rank with tp_rank, cp_rank and pp_rank 0 of a data-parallel replica. Megatron
        numbers ranks over tp first, then cp, then dp, then pp.
        """
        return dp_rank * self.cp_size * self.tp_size

    def shard(self, *, is_expert: bool = False) -> Shard:
        """Return this rank's shard of experts' parameters, or of all other parameters."""
        if is_expert and self.experts is not None:
            return self.experts
        return Shard(
            tp_rank=self.tp_rank,
            tp_size=self.tp_size,
            copy_rank=self.dp_rank * self.cp_size + self.cp_rank,
            num_copies=self.dp_size * self.cp_size,
        )

    def local_experts(self, num_experts: int) -> range:
        """Return the global numbers of the experts on this rank, in the order it holds them."""
        num_local = num_experts // self.ep_size
        return range(self.ep_rank * num_local, (self.ep_rank + 1) * num_local)


def start_distributed(
    device: Device, parallel: ParallelConfig, *, minutes: float = 30
) -> Layout:
    """Join the job's process group (torchrun's, or a group of one) and make Megatron's groups.

    parallel: a layout that these ranks can hold. minutes: time-out of collectives. Called once by
    every rank.
    """
    if not dist.is_initialized():
        join_job(device, timedelta(minutes=minutes))
    return make_groups(parallel, minutes=minutes)


def make_groups(parallel: ParallelConfig, *, minutes: float = 30) -> Layout:
    """Make Megatron's groups in the job's process group. Called once by every rank.

    minutes: time-out of their collectives; rounded up to whole minutes.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.expert_tp,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=math.ceil(minutes),
    )
    return current_layout()


def current_layout() -> Layout:
    """Read this rank's place from Megatron's groups."""
    return Layout(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
        experts=Shard(
            tp_rank=parallel_state.get_expert_tensor_parallel_rank(),
            tp_size=parallel_state.get_expert_tensor_parallel_world_size(),
            copy_rank=parallel_state.get_expert_data_parallel_rank(),
            num_copies=parallel_state.get_expert_data_parallel_world_size(),
        ),
    )


def tensor_parallel_group(*, is_expert: bool = False) -> dist.ProcessGroup:
    """Return the ranks that share each parameter, or each parameter of an expert."""
    if is_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def stop_distributed() -> None:
    """Leave Megatron's groups and the job's. Does nothing if none was started, or if an engine has
    destroyed the job's group already.
    """
    parallel_state.destroy_model_parallel()
    leave_job()


def gather_from_all(items: Sequence[T]) -> list[T]:
    """Return every rank's items in rank order, on every rank. Collective over the world."""
    vectors = all_gather_bytes(to_bytes(list(items)))
    return list(chain.from_iterable(map(from_bytes, vectors)))


def ranks_by_value(value: K) -> dict[K, tuple[int, ...]]:
    """Return each value that a rank passes -> the ranks that pass it. Collective over the world.

    Only the first of the ranks with the same value sends it: in a large job all ranks pass the same
    few large values.
    """
    ranks_by_digest: dict[bytes, list[int]] = {}
    for rank, digest in enumerate(all_gather_bytes(digest_of(value))):
        key = digest.numpy().tobytes()
        ranks_by_digest.setdefault(key, []).append(rank)
    ranks_of_value = list(map(tuple, ranks_by_digest.values()))
    me = dist.get_rank()
    is_first = any(ranks[0] == me for ranks in ranks_of_value)
    # Both lists are in the order of the first ranks.
    values = gather_from_all([value] if is_first else [])
    return dict(zip(values, ranks_of_value, strict=True))


def sum_over_world(values: Sequence[float]) -> list[float]:
    """Return elementwise float64 sums over all ranks. Collective over the world."""
    return sum_over(torch.tensor(values, dtype=torch.float64)).tolist()


def max_over_world(values: Sequence[float]) -> list[float]:
    """Return elementwise float64 maxima over all ranks. Collective over the world."""
    return max_over(torch.tensor(values, dtype=torch.float64)).tolist()


def sum_over(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Replace the tensor, in place, by the elementwise sum over the group's ranks, and return it.
    Collective over the group, by default the world.
    """
    dist.all_reduce(tensor, group=group)
    return tensor


def max_over(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Replace the tensor, in place, by the elementwise maximum over the group's ranks, and return
    it. Collective over the group, by default the world.
    """
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor


def broadcast_over(tensor: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
    """Replace the tensor, in place, by that of the group's rank `source`, and return it.
    Collective over the group.
    """
    dist.broadcast(tensor, group=group, group_src=source)
    return tensor


def broadcast_in_replica(tensor: Tensor) -> Tensor:
    """Replace the tensor, in place, by that of the replica's first rank, and return it.

    Collective over the ranks of a data-parallel replica, which pass tensors of the same size.
    """
    context = parallel_state.get_context_parallel_group()
    group = parallel_state.get_model_parallel_group()
    # First to the ranks of other slices with tp_rank and pp_rank 0, and from each to its own group.
    if context.size() > 1 and group.rank() == 0:
        broadcast_over(tensor, 0, context)
    if group.size() > 1:
        broadcast_over(tensor, 0, group)
    return tensor


def any_over_world(flag: bool) -> bool:
    """True if the flag is true on any rank. Collective over the world."""
    return sum_over_world([float(flag)])[0] > 0


def broadcast_object(value: T) -> T:
    """Return rank 0's value on every rank. Collective over the world."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def deal(items_for: Mapping[int, Sequence[T]]) -> list[T]:
    """Send items to other ranks, and return the items for this rank, ordered by their sender.

    items_for: rank -> the items for it. Collective over the world.
    """
    me = dist.get_rank()
    outgoing = {
        rank: to_bytes(list(items)) for rank, items in items_for.items() if rank != me
    }
    incoming = route_bytes(outgoing)
    items_from = {sender: from_bytes(vector) for sender, vector in incoming.items()}
    items_from[me] = items_for.get(me, ())
    return list(chain.from_iterable(items_from[rank] for rank in sorted(items_from)))


def sum_over_context(tensor: Tensor) -> Tensor:
    """Return a new tensor, the elementwise sum over the context-parallel group.

    Collective over the group, in the backward pass too: every rank's result depends on every rank's
    tensor.
    """
    group = parallel_state.get_context_parallel_group()
    return all_reduce(tensor, group=group)


def join_over_context(values_R: Tensor, batch: MicroBatch) -> Tensor:
    """Return the values of all response tokens of the pack of which `batch` is this rank's slice,
    [num_tokens, ...].

    It is a sum over the context-parallel group: each rank fills in its own tokens, with zeros
    elsewhere, so that no value is rounded. Collective over the group. A rank that holds all tokens
    gets `values_R` itself.
    """
    if batch.response_indices_R is None:
        return values_R
    whole = values_R.new_zeros(sum(batch.response_lengths), *values_R.shape[1:])
    whole[batch.response_indices_R] = values_R
    return sum_over_context(whole)
