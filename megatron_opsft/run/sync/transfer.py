"""Copies weights in place by a schedule: from the trainer's shards into the engine's parameters, or
back.

A rank carries out its part of the schedule: it packs, sends, receives and unpacks. While one round
travels, the next one is packed and the one before is unpacked.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_opsft.models.weights.rectangles import Rect
from megatron_opsft.models.weights.reshard import Placement
from megatron_opsft.models.weights.schedule import Program, Round, make_schedule
from megatron_opsft.models.weights.slicing import shard_parameter
from megatron_opsft.rollout.engine import EngineLayout, RolloutEngine
from megatron_opsft.runtime.distributed import ranks_by_value
from megatron_opsft.runtime.libraries import collector_at_rest
from megatron_opsft.trainer.model.shards import ModelShards

# Rectangles of at least this many bytes get a message of their own.
ALONE_BYTES = 2**17


class _Message:
    """Views of parameters that travel together in one `buffer`, which is sent or received.

    A single contiguous view is its own buffer.
    """

    def __init__(self, views: Sequence[Tensor]) -> None:
        self.buffer = views[0]
        # Each view and the slice of the buffer that has its values.
        self._pairs = []
        if len(views) > 1 or not views[0].is_contiguous():
            sizes = [view.numel() for view in views]
            self.buffer = views[0].new_empty(sum(sizes))
            for view, values in zip(views, self.buffer.split(sizes), strict=True):
                self._pairs.append((view, values.view(view.shape)))

    def pack(self) -> None:
        """Copy the views into the buffer."""
        for view, values in self._pairs:
            values.copy_(view)

    def unpack(self) -> None:
        """Copy the buffer into the views."""
        for view, values in self._pairs:
            view.copy_(values)


@dataclass(eq=False)
class Transfer:
    """Fills the targets of all ranks from their sources. It is made once and run for every weight
    sync.
    """

    program: Program
    """This rank's part of a schedule that is the same for all ranks."""
    sources: Mapping[str, Tensor]
    """This rank's live parameters by their names in the schedule, looked up anew at every run."""
    targets: Mapping[str, Tensor]
    """The parameters to fill, alike and of the same dtype."""
    _is_connected: bool = field(default=False, init=False)

    @torch.no_grad()
    def run(self) -> None:
        """Fill the targets. Collective over the world. Takes less than two buckets of memory."""
        if self.program.rounds and not self._is_connected:
            # NCCL wants a collective of all ranks before messages between some of them.
            parameters = [
                *self.sources.values(),
                *self.targets.values(),
                torch.empty(0),
            ]
            dist.all_reduce(parameters[0].new_zeros(1, dtype=torch.uint8))
            self._is_connected = True
        # What is done while a round travels: first the copies on this rank, then always the
        # unpacking of the round before.
        finish = self._fill_locally
        for index, current in enumerate(self.program.rounds):
            finish_current = self._post(current, index)
            finish()
            finish = finish_current
        finish()

    def _post(self, current: Round, index: int) -> Callable[[], None]:
        """Start a round; return the function that waits for it and unpacks what it brings."""
        sent, received = [], []
        operations = []
        for peer, rects in current.receives.items():
            for message in _messages(rects, self.targets):
                received.append(message)
                operations.append(
                    dist.P2POp(dist.irecv, message.buffer, peer, tag=index)
                )
        for peer, rects in current.sends.items():
            for message in _messages(rects, self.sources):
                message.pack()
                sent.append(message)
                operations.append(
                    dist.P2POp(dist.isend, message.buffer, peer, tag=index)
                )
        works = dist.batch_isend_irecv(operations) if operations else []

        def finish() -> None:
            for work in works:
                work.wait()
            for message in received:
                message.unpack()
            # Until here the buffers had to live.
            sent.clear()

        return finish

    def _fill_locally(self) -> None:
        """Copy what this rank has itself, and zero the padding."""
        for copy in self.program.copies:
            source = copy.source.view(self.sources[copy.source.tensor])
            copy.target.view(self.targets[copy.target.tensor]).copy_(source)
        for padding in self.program.zeros:
            padding.view(self.targets[padding.tensor]).zero_()


def _messages(
    rects: Sequence[Rect], tensors: Mapping[str, Tensor]
) -> Iterator[_Message]:
    """Yield one message of all small rectangles, then one for each large rectangle.

    Sender and receiver agree on the messages, since only sizes decide.
    """
    views = [rect.view(tensors[rect.tensor]) for rect in rects]
    small = [view for view in views if view.nbytes < ALONE_BYTES]
    if small:
        yield _Message(small)
    for view in views:
        if view.nbytes >= ALONE_BYTES:
            yield _Message([view])


def plan_transfer(
    shards: ModelShards, engine: RolloutEngine, bucket_mb: int, *, pull: bool = False
) -> tuple[Transfer, int]:
    """Plan the transfer from trainer to engine; with `pull`, from engine to trainer.

    Returns it and the most bytes that a rank sends. Collective over the world.
    """
    sides = [
        (trainer_placements(shards), shards.by_name),
        (engine_placements(engine.layout), engine.weights()),
    ]
    if pull:
        sides.reverse()
    (sources, source_tensors), (targets, target_tensors) = sides
    rank = shards.layout.rank
    schedule = make_schedule(
        sources,
        targets,
        rank=rank,
        itemsize=shards.dtype.itemsize,
        bucket_bytes=bucket_mb * 2**20,
    )
    transfer = Transfer(schedule.program(rank), source_tensors, target_tensors)
    return transfer, max(schedule.bytes_sent.values())


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
