"""Process groups of a run: started once, read through one frozen record."""

import math
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

from megatron_opsft.config.training import ParallelConfig, check_world
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Which tensor-parallel part of its parameters a rank holds, of how many; and which of the
    copies of that part, of how many ranks that hold the same.
    """

    tp_rank: int
    tp_size: int
    copy_rank: int
    num_copies: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """This rank's place in TP x CP x DP x PP; of experts in ETP x EP x EDP x PP.

    experts: how they are cut; None: as everything else, with all of them on every rank.
    """

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

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_loss_rank(self) -> bool:
        """Whether this rank's token losses are the ones to add up: of a data-parallel replica one
        rank, or one for each part of its packs.
        """
        return self.pp_rank == self.pp_size - 1 and self.tp_rank == 0

    def first_of_replica(self, dp_rank: int) -> int:
        """The rank with tp_rank, cp_rank and pp_rank 0 of a data-parallel replica: Megatron counts
        ranks over tp first, then cp, then dp, then pp.
        """
        return dp_rank * self.cp_size * self.tp_size

    def shard(self, *, is_expert: bool = False) -> Shard:
        """Of the parameters of experts, or of all others."""
        if is_expert and self.experts is not None:
            return self.experts
        return Shard(
            tp_rank=self.tp_rank,
            tp_size=self.tp_size,
            copy_rank=self.dp_rank * self.cp_size + self.cp_rank,
            num_copies=self.dp_size * self.cp_size,
        )

    def local_experts(self, num_experts: int) -> range:
        """The global numbers of those that this rank holds, in their order there."""
        each = num_experts // self.ep_size
        return range(self.ep_rank * each, (self.ep_rank + 1) * each)


def start_distributed(
    device: Device, parallel: ParallelConfig, *, minutes: float = 30
) -> Layout:
    """Join the job's process group (torchrun's, or a group of one) and make Megatron's groups.

    Called once by every rank. Errors: `UserError` when the world size is not a multiple of
    tp x pp x cp.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    check_world(world_size, parallel)
    if not dist.is_initialized():
        join_job(device, timedelta(minutes=minutes))
    return make_groups(parallel, minutes=minutes)


def make_groups(parallel: ParallelConfig, *, minutes: float = 30) -> Layout:
    """Megatron's groups of the job's process group, which is there. Called once by every rank.

    minutes: after which their collectives give up; whole ones, rounded up.
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
    """This rank's place, read from Megatron's groups."""
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


def stop_distributed() -> None:
    """Leave Megatron's groups and the job's; safe to call when nothing was started, or when an
    engine has left the job's group already.
    """
    parallel_state.destroy_model_parallel()
    leave_job()


def gather_from_all(items: Sequence[T]) -> list[T]:
    """Every rank's items in rank order, on every rank. Collective over the world."""
    parts = all_gather_bytes(to_bytes(list(items)))
    return [item for part in parts for item in from_bytes(part)]


def ranks_by_value(own: K) -> dict[K, tuple[int, ...]]:
    """Each rank's value -> the ranks that gave it. Collective over the world. A value is told once,
    by the first of the ranks that have it: all have the same few large ones in a large job.
    """
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, digest in enumerate(all_gather_bytes(digest_of(own))):
        ranks.setdefault(tuple(digest.tolist()), []).append(rank)
    is_first = any(same[0] == dist.get_rank() for same in ranks.values())
    values = gather_from_all([own] if is_first else [])
    return {
        value: tuple(same) for value, same in zip(values, ranks.values(), strict=True)
    }


def sum_over_world(values: Sequence[float]) -> list[float]:
    """Elementwise float64 sums over all ranks. Collective over the world."""
    return sum_over(torch.tensor(list(values), dtype=torch.float64)).tolist()


def max_over_world(values: Sequence[float]) -> list[float]:
    """Elementwise float64 maxima over all ranks. Collective over the world."""
    return max_over(torch.tensor(list(values), dtype=torch.float64)).tolist()


def sum_over(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The tensor itself, now the elementwise sum over the group's ranks, by default all. Collective
    over it.
    """
    dist.all_reduce(tensor, group=group)
    return tensor


def max_over(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """As `sum_over`, of the elementwise maximum."""
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor


def broadcast_over(tensor: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
    """The tensor itself, now that of the group's rank `source`. Collective over the group."""
    dist.broadcast(tensor, group=group, group_src=source)
    return tensor


def broadcast_in_replica(tensor: Tensor) -> Tensor:
    """The tensor of the replica's first rank, on all its ranks; each gives one of that size, which
    is overwritten. Collective over the ranks of a data-parallel replica.
    """
    context: dist.ProcessGroup = parallel_state.get_context_parallel_group()
    group: dist.ProcessGroup = parallel_state.get_model_parallel_group()
    if context.size() > 1 and group.rank() == 0:
        broadcast_over(tensor, 0, context)
    return tensor if group.size() == 1 else broadcast_over(tensor, 0, group)


def any_over_world(flag: bool) -> bool:
    """Whether any rank says yes. Collective over the world."""
    return sum_over_world([float(flag)])[0] > 0


def broadcast_object(value: T) -> T:
    """Rank 0's value on every rank. Collective over the world."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def deal(items_for: Mapping[int, Sequence[T]]) -> list[T]:
    """Items for other ranks, by rank; those for this rank, by the rank they are from.

    Collective over the world.
    """
    me = dist.get_rank()
    away = {
        rank: to_bytes(list(items)) for rank, items in items_for.items() if rank != me
    }
    parts = {rank: from_bytes(part) for rank, part in route_bytes(away).items()}
    parts[me] = list(items_for.get(me, ()))
    return [item for rank in sorted(parts) for item in parts[rank]]


def sum_over_context(part: Tensor) -> Tensor:
    """Elementwise sum over the group's ranks, a tensor of its own. Collective over them, and in the
    backward pass too: every rank's result depends on every rank's part.
    """
    total: Tensor = all_reduce(part, group=parallel_state.get_context_parallel_group())
    return total


def join_over_context(
    values_R: Tensor, response_indices_R: Tensor | None, num_tokens: int
) -> Tensor:
    """Of all response tokens of a pack, [num_tokens, ...], what the group's ranks have at their
    places; `values_R` itself where there is no group. Bit for bit: all others add zero.
    """
    if response_indices_R is None:
        return values_R
    whole = values_R.new_zeros(num_tokens, *values_R.shape[1:])
    whole[response_indices_R] = values_R
    return sum_over_context(whole)
