"""Writes weights in place, by a schedule: from the trainer's shards into the engine's own
parameters, and back.

A rank carries out its part of the schedule: it packs, sends, receives and unpacks.

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
from megatron_opsft.models.weights.schedule import Program, Round, make_schedule
from megatron_opsft.models.weights.slicing import shard_parameter
from megatron_opsft.rollout.engine import EngineLayout, RolloutEngine
from megatron_opsft.runtime.distributed import ranks_by_value
from megatron_opsft.runtime.libraries import collector_at_rest
from megatron_opsft.trainer.model.shards import ModelShards

ALONE_BYTES = 2**17
"""From this size on a rectangle travels alone."""


class _Message:
    """Views of parameters that travel together, in `buffer`: the memory of one that is contiguous,
    or memory of their own.
    """

    def __init__(self, views: Sequence[Tensor]) -> None:
        self._views = views
        self._is_copy = len(views) > 1 or not views[0].is_contiguous()
        self.buffer = views[0]
        if self._is_copy:
            self.buffer = views[0].new_empty(sum(view.numel() for view in views))

    def pack(self) -> None:
        """Views -> buffer."""
        for view, packed in self._pairs():
            packed.copy_(view)

    def unpack(self) -> None:
        """Buffer -> views."""
        for view, packed in self._pairs():
            view.copy_(packed)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each view and its part of the buffer."""
        if self._is_copy:
            parts = self.buffer.split([view.numel() for view in self._views])
            yield from (
                (v, part.view(v.shape))
                for v, part in zip(self._views, parts, strict=True)
            )


@dataclass(eq=False)
class Transfer:
    """Fills the targets of all ranks from their sources; made once, run for every push or pull.

    program: this rank's of the same schedule. sources, targets: its live parameters under the
    schedule's names, looked up anew at every run; all of one dtype.
    """

    program: Program
    sources: Mapping[str, Tensor]
    targets: Mapping[str, Tensor]
    _is_connected: bool = field(default=False, init=False)

    @torch.no_grad()
    def run(self) -> None:
        """Collective over the world. It takes less than two buckets of memory."""
        if self.program.rounds and not self._is_connected:
            # NCCL wants a collective of all ranks before messages between some of them.
            held = chain(self.sources.values(), self.targets.values())
            dist.all_reduce(next(held, torch.empty(0)).new_zeros(1, dtype=torch.uint8))
            self._is_connected = True
        finish: Callable[[], None] = self._fill_locally  # while the first round travels
        for index, current in enumerate(self.program.rounds):
            following = self._post(current, index)
            finish()
            finish = following
        finish()

    def _post(self, current: Round, index: int) -> Callable[[], None]:
        """Start a round; the rest of it waits, and unpacks. Until then the messages must live."""
        sent, received = [], []
        operations: list[dist.P2POp] = []
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
            sent.clear()

        return finish

    def _fill_locally(self) -> None:
        """Copy between own parameters."""
        for copy in self.program.copies:
            source = copy.source.view(self.sources[copy.source.tensor])
            copy.target.view(self.targets[copy.target.tensor]).copy_(source)
        for padding in self.program.zeros:
            padding.view(self.targets[padding.tensor]).zero_()


def _messages(
    rects: Sequence[Rect], tensors: Mapping[str, Tensor]
) -> Iterator[_Message]:
    """Large rectangles travel alone, without a copy where they are contiguous; the small ones in
    one message. Sender and receiver decide by size alone.
    """
    views = [rect.view(tensors[rect.tensor]) for rect in rects]
    small = [view for view in views if view.nbytes < ALONE_BYTES]
    if small:
        yield _Message(small)
    yield from (_Message([view]) for view in views if view.nbytes >= ALONE_BYTES)


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
    transfer = Transfer(schedule.program(rank), from_tensors, to_tensors)
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
