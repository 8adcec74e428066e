"""Copies weights in place by a schedule: from the trainer's shards into the engine's parameters, or
back.

A rank carries out its own schedule: it packs, sends, receives and unpacks. While one round
travels, the next one is packed and the one before is unpacked.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_opsft.models.weights.reshard import Placement
from megatron_opsft.models.weights.schedule import RankSchedule, make_schedule
from megatron_opsft.models.weights.slicing import shard_parameter
from megatron_opsft.rollout.engine import EngineLayout, RolloutEngine
from megatron_opsft.runtime.distributed import ranks_by_value
from megatron_opsft.runtime.libraries import collector_at_rest
from megatron_opsft.trainer.model.lora import PolicyWeights
from megatron_opsft.trainer.model.shards import ModelShards

# Rectangles of at least this many bytes get a message of their own.
ALONE_BYTES = 2**17


@dataclass(eq=False)
class Transfer:
    """Fills the targets of all ranks from their sources. It is made once and run for every weight
    sync.
    """

    schedule: RankSchedule
    """This rank's schedule; the other ranks carry out theirs at the same time."""
    targets: Mapping[str, Tensor]
    """This rank's live parameters to fill, by their names in the schedule."""
    dtype: torch.dtype
    """Dtype of what travels; parameters may have another."""

    @torch.no_grad()
    def run(self, sources: Mapping[str, Tensor]) -> None:
        """Fill the targets. Collective over the world. Takes less than two buckets of memory.

        sources: this rank's weights by their names in the schedule.
        """
        # What is done while a round travels: first the copies on this rank, then always the
        # unpacking of the round before.
        finish: Callable[[], None] = partial(self._fill_locally, sources)
        for index in range(len(self.schedule.sends)):
            finish_next = self._post(index, sources)
            finish()
            finish = finish_next
        finish()

    def _post(self, index: int, sources: Mapping[str, Tensor]) -> Callable[[], None]:
        """Start a round; return the function that waits for it and unpacks what it brings."""
        received: list[tuple[Sequence[Tensor], Tensor]] = []
        operations: list[dist.P2POp] = []
        for peer, rects in self.schedule.receives[index].items():
            to_fill = [rect.view(self.targets[rect.tensor]) for rect in rects]
            for views in self._messages(to_fill):
                buffer = self._buffer_of(views)
                received.append((views, buffer))
                operations.append(dist.P2POp(dist.irecv, buffer, peer, tag=index))
        for peer, to_send in self._views_to_send(index, sources).items():
            for views in self._messages(to_send):
                buffer = self._buffer_of(views)
                for view, packed in _packed_views(views, buffer):
                    packed.copy_(view)
                operations.append(dist.P2POp(dist.isend, buffer, peer, tag=index))
        works = dist.batch_isend_irecv(operations) if operations else []

        def finish() -> None:
            for work in works:
                work.wait()
            for views, buffer in received:
                for view, packed in _packed_views(views, buffer):
                    view.copy_(packed)
            operations.clear()  # until here the buffers had to live

        return finish

    def _views_to_send(
        self, index: int, sources: Mapping[str, Tensor]
    ) -> dict[int, list[Tensor]]:
        """Return receiving rank -> views of the weights that it gets in a round.

        A weight with an adapter is a sum that is made when it is asked for. So it is asked for once
        for all receivers, and they get copies of their parts, that the whole may be freed.
        """
        sends = self.schedule.sends[index]
        places: list[tuple[str, int, int]] = []
        for peer, rects in sends.items():
            places += [(rect.tensor, peer, n) for n, rect in enumerate(rects)]
        views_of: dict[int, dict[int, Tensor]] = {peer: {} for peer in sends}
        for name, peer, number in sorted(places):
            view = sends[peer][number].view(sources[name])
            is_sum = isinstance(sources, PolicyWeights) and sources.is_adapted(name)
            views_of[peer][number] = view.clone() if is_sum else view
        return {
            peer: [views[number] for number in sorted(views)]
            for peer, views in views_of.items()
        }

    def _fill_locally(self, sources: Mapping[str, Tensor]) -> None:
        """Copy what this rank has itself, and zero the padding."""
        for copy in self.schedule.copies:
            source = copy.source.view(sources[copy.source.tensor])
            copy.target.view(self.targets[copy.target.tensor]).copy_(source)
        for padding in self.schedule.zeros:
            padding.view(self.targets[padding.tensor]).zero_()

    def _messages(self, views: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Group views of parameters into messages: all small ones in one, each large one alone,
        which needs no copy if it is contiguous. Sender and receiver decide by size alone.
        """
        num_alone = ALONE_BYTES // self.dtype.itemsize
        small = [view for view in views if view.numel() < num_alone]
        if small:
            yield small
        for view in views:
            if view.numel() >= num_alone:
                yield [view]

    def _buffer_of(self, views: Sequence[Tensor]) -> Tensor:
        """Return the memory of a message: that of its only view if that can travel as it is, else
        new memory.
        """
        first = views[0]
        if len(views) == 1 and first.is_contiguous() and first.dtype == self.dtype:
            return first
        num_elements = sum(view.numel() for view in views)
        return first.new_empty(num_elements, dtype=self.dtype)


def _packed_views(
    views: Sequence[Tensor], buffer: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pair each view with its section of the buffer; nothing if the buffer is the view itself."""
    if buffer is not views[0]:
        sections = buffer.split([view.numel() for view in views])
        for view, section in zip(views, sections, strict=True):
            yield view, section.view(view.shape)


def plan_transfer(
    shards: ModelShards, engine: RolloutEngine, bucket_mb: int, *, pull: bool = False
) -> Transfer:
    """Plan the transfer from trainer to engine; with `pull`, from engine to trainer.

    Collective over the world.
    """
    # NCCL wants a collective of all ranks before messages between some of them.
    _, shard = shards.parameters[0]
    dist.all_reduce(shard.new_zeros(1, dtype=torch.uint8))
    sources, targets = trainer_placements(shards), engine_placements(engine.layout)
    filled = engine.weights()
    if pull:
        sources, targets = targets, sources
        filled = shards.by_name
    schedule = make_schedule(
        sources,
        targets,
        rank=shards.layout.rank,
        itemsize=shards.dtype.itemsize,
        bucket_bytes=bucket_mb * 2**20,
    )
    return Transfer(schedule, filled, shards.dtype)


def trainer_placements(shards: ModelShards) -> list[Placement]:
    """Return what every training rank holds. Collective over the world."""
    layout = shards.layout
    dense, expert = layout.shard(), layout.shard(is_expert=True)
    tp_ranks_here = dense.tp_rank, expert.tp_rank
    names_here = tuple(rule.mcore_name for rule, _ in shards.parameters)
    placements = []
    for (tp_ranks, names), ranks in ranks_by_value((tp_ranks_here, names_here)).items():
        dense_rank, expert_rank = tp_ranks
        parameters = tuple(
            shard_parameter(rule, expert_rank, expert.tp_size)
            if rule.is_expert
            else shard_parameter(rule, dense_rank, dense.tp_size)
            for rule in map(shards.table.by_mcore_name.__getitem__, names)
        )
        placements.append(Placement(ranks=ranks, parameters=parameters))
    return placements


@collector_at_rest()
def engine_placements(engine: EngineLayout) -> list[Placement]:
    """Return what the engine of every rank holds. Collective over the world."""
    return [
        Placement(ranks=ranks, parameters=engine.parameters_of(tp_rank))
        for tp_rank, ranks in ranks_by_value(engine.tp_rank).items()
    ]
