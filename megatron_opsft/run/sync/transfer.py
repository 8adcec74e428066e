"""Writes weights in place, by a schedule: from the trainer's shards into the engine's own
parameters, and back.

A rank carries out its own schedule: it packs, sends, receives and unpacks.

Two rounds are on their way at a time: while one travels, the next is packed, and the one before is
unpacked.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_opsft.models.weights.rectangles import Rect
from megatron_opsft.models.weights.reshard import Placement
from megatron_opsft.models.weights.schedule import RankSchedule, make_schedule
from megatron_opsft.models.weights.slicing import shard_parameter
from megatron_opsft.rollout.engine import EngineLayout, RolloutEngine
from megatron_opsft.runtime.distributed import ranks_by_value
from megatron_opsft.runtime.libraries import collector_at_rest
from megatron_opsft.trainer.model.shards import ModelShards

ALONE_BYTES = 2**17
"""From this size on a rectangle travels alone."""


@dataclass(eq=False)
class Transfer:
    """Fills the targets of all ranks from their sources; made once, run for every push or pull."""

    schedule: RankSchedule
    """This rank's schedule; the other ranks carry out theirs at the same time."""
    sources: Mapping[str, Tensor]
    """The rank's live source parameters under the schedule's names, looked up at every run."""
    targets: Mapping[str, Tensor]
    """The rank's live target parameters, likewise; all parameters have one dtype."""
    _is_connected: bool = field(default=False, init=False)

    @torch.no_grad()
    def run(self) -> None:
        """Collective over the world. It takes less than two buckets of memory."""
        num_rounds = len(self.schedule.sends)
        if num_rounds and not self._is_connected:
            # NCCL wants a collective of all ranks before messages between some of them.
            held = chain(self.sources.values(), self.targets.values())
            dist.all_reduce(next(held, torch.empty(0)).new_zeros(1, dtype=torch.uint8))
            self._is_connected = True
        finish: Callable[[], None] = self._fill_locally  # while the first round travels
        for index in range(num_rounds):
            following = self._post(index)
            finish()
            finish = following
        finish()

    def _post(self, index: int) -> Callable[[], None]:
        """Start a round. Returns how to finish it: wait, then unpack what was received. Until then
        the buffers must live.
        """
        sent: list[Tensor] = []
        received: list[tuple[Sequence[Tensor], Tensor]] = []
        operations: list[dist.P2POp] = []
        for peer, rects in self.schedule.receives[index].items():
            for views in _messages(rects, self.targets):
                buffer = _buffer_of(views)
                received.append((views, buffer))
                operations.append(dist.P2POp(dist.irecv, buffer, peer, tag=index))
        for peer, rects in self.schedule.sends[index].items():
            for views in _messages(rects, self.sources):
                buffer = _buffer_of(views)
                for view, packed in _packed_views(views, buffer):
                    packed.copy_(view)
                sent.append(buffer)
                operations.append(dist.P2POp(dist.isend, buffer, peer, tag=index))
        works = dist.batch_isend_irecv(operations) if operations else []

        def finish() -> None:
            for work in works:
                work.wait()
            for views, buffer in received:
                for view, packed in _packed_views(views, buffer):
                    view.copy_(packed)
            sent.clear()

        return finish

    def _fill_locally(self) -> None:
        """Copy between own parameters."""
        for copy in self.schedule.copies:
            source = copy.source.view(self.sources[copy.source.tensor])
            copy.target.view(self.targets[copy.target.tensor]).copy_(source)
        for padding in self.schedule.zeros:
            padding.view(self.targets[padding.tensor]).zero_()


def _messages(
    rects: Sequence[Rect], tensors: Mapping[str, Tensor]
) -> Iterator[list[Tensor]]:
    """Group views of parameters into messages: all small ones in one, each large one alone, which
    needs no copy if it is contiguous. Sender and receiver decide by size alone.
    """
    views = [rect.view(tensors[rect.tensor]) for rect in rects]
    small = [view for view in views if view.nbytes < ALONE_BYTES]
    if small:
        yield small
    yield from ([view] for view in views if view.nbytes >= ALONE_BYTES)


def _buffer_of(views: Sequence[Tensor]) -> Tensor:
    """Return the memory of a message: that of its only view if contiguous, else new memory."""
    if len(views) == 1 and views[0].is_contiguous():
        return views[0]
    return views[0].new_empty(sum(view.numel() for view in views))


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
) -> tuple[Transfer, int]:
    """Trainer -> engine, or back, and the most bytes that a rank sends. Collective over the
    world.
    """
    sides = [
        (trainer_placements(shards), shards.by_name),
        (engine_placements(engine.layout), engine.weights()),
    ]
    (sources, from_tensors), (targets, to_tensors) = reversed(sides) if pull else sides
    rank, itemsize = shards.layout.rank, shards.dtype.itemsize
    schedule = make_schedule(
        sources, targets, rank=rank, itemsize=itemsize, bucket_bytes=bucket_mb * 2**20
    )
    transfer = Transfer(schedule, from_tensors, to_tensors)
    return transfer, max(schedule.bytes_sent.values())


def trainer_placements(shards: ModelShards) -> list[Placement]:
    """What every training rank holds, exchanged by name."""
    layout, table = shards.layout, shards.table
    names = tuple(rule.mcore_name for rule, _ in shards.parameters)
    own = {is_expert: layout.shard(is_expert=is_expert) for is_expert in (False, True)}
    tp_ranks = tuple(shard.tp_rank for shard in own.values())
    return [
        Placement(
            ranks=ranks,
            parameters=tuple(
                shard_parameter(
                    rule, of_kind[rule.is_expert], own[rule.is_expert].tp_size
                )
                for rule in map(table.by_mcore_name.__getitem__, held)
            ),
        )
        for (of_kind, held), ranks in ranks_by_value((tp_ranks, names)).items()
    ]


@collector_at_rest()
def engine_placements(engine: EngineLayout) -> list[Placement]:
    """What every rank's engine holds, by tensor-parallel rank."""
    return [
        Placement(ranks=ranks, parameters=engine.parameters_of(of_ranks))
        for of_ranks, ranks in ranks_by_value(engine.tp_rank).items()
    ]
