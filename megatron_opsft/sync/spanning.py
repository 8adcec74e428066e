"""The push to engines in processes of their own, here or on other nodes: from the training ranks'
shards straight to the engines' workers, over a process group that spans both.

The workers are the ranks behind the trainer's. The first push in a group goes through each engine's
own loader; the later ones write its parameters in place, where that is known to be right.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from math import prod

from megatron_opsft.errors import EngineDied, SyncError
from megatron_opsft.model.shards import ModelShards
from megatron_opsft.rollout.engine import ReachableEngine
from megatron_opsft.runtime.distributed import sum_over_world
from megatron_opsft.sync.in_place import trainer_placements
from megatron_opsft.transfer.receiver import Way
from megatron_opsft.transfer.transfer import Transfer
from megatron_opsft.weights.rectangles import hf_parameters
from megatron_opsft.weights.reshard import Placement
from megatron_opsft.weights.schedule import Schedule, make_schedule

_MAX_DEATHS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """in_place: which way it took. bytes_sent: by all ranks."""

    in_place: bool
    bytes_sent: int


class SpanningPush:
    """Pushes to `engine`; made once."""

    def __init__(self, shards: ModelShards, engine: ReachableEngine, bucket_bytes: int) -> None:
        self._shards = shards
        self._engine = engine
        self._bucket_bytes = bucket_bytes
        self.may_write_in_place = False
        self._planned: bool | None = None
        self._transfers: list[Transfer] = []

    def push(self, version: int) -> Pushed:
        """Collective over the world. Errors: `SyncError` where engines die again and again."""
        died = ""
        for _ in range(_MAX_DEATHS):
            try:
                return self._push(version)
            except EngineDied as death:
                died = str(death)
        raise SyncError(f"rollout engines died in {_MAX_DEATHS} pushes in a row: {died}")

    def _push(self, version: int) -> Pushed:
        in_place = self.may_write_in_place
        if self._engine.group is None:
            self._engine.join()
            self._planned, in_place = None, False  # who has just come has nothing
        elif self._planned is None:
            in_place = False
        if self._planned is not in_place:
            self._plan(in_place)
        self._engine.receive(self._send, version)
        (sent,) = sum_over_world([sum(transfer.bytes_sent for transfer in self._transfers)])
        return Pushed(in_place=in_place, bytes_sent=int(sent))

    def _send(self) -> None:
        for transfer in self._transfers:
            transfer.run()

    def _plan(self, in_place: bool) -> None:
        group = self._engine.group
        assert group is not None
        self._transfers = []
        schedules = list(self._schedules(in_place))
        shapes = {} if in_place else self._shards.table.hf_shapes()

        def way_of(rank: int) -> Way:
            programs = tuple(schedule.program(rank) for schedule in schedules)
            return Way(in_place=in_place, programs=programs, shapes=shapes)

        self._engine.plan(way_of)
        rank, sources = self._shards.layout.rank, self._shards.by_name
        self._transfers = [
            Transfer(schedule.program(rank), sources, {}, group) for schedule in schedules
        ]
        self._planned = in_place

    def _schedules(self, in_place: bool) -> Iterator[Schedule]:
        """One that fills the engines' parameters, or one for each bucket of whole tensors."""
        trained, layout = trainer_placements(self._shards), self._engine.layout
        first, tp_size = self._shards.layout.world_size, layout.tp_size
        workers = range(first, first + tp_size * self._engine.num_engines)
        if in_place:
            targets = [
                Placement(tuple(workers[tp_rank::tp_size]), layout.parameters_of(tp_rank))
                for tp_rank in range(tp_size)
            ]
            yield self._schedule(trained, targets, len(workers))
            return
        for shapes in self._buckets():
            whole = Placement(tuple(workers), hf_parameters(shapes))
            yield self._schedule(_only(trained, shapes), [whole], len(workers))

    def _schedule(
        self, sources: list[Placement], targets: list[Placement], num_workers: int
    ) -> Schedule:
        return make_schedule(
            sources,
            targets,
            itemsize=self._shards.dtype.itemsize,
            world_size=self._shards.layout.world_size + num_workers,
            bucket_bytes=self._bucket_bytes,
        )

    def _buckets(self) -> Iterator[dict[str, tuple[int, ...]]]:
        """Consecutive HF tensors of at most a bucket, or one that is larger."""
        current: dict[str, tuple[int, ...]] = {}
        size = 0
        for name, shape in self._shards.table.hf_shapes().items():
            num_bytes = prod(shape) * self._shards.dtype.itemsize
            if current and size + num_bytes > self._bucket_bytes:
                yield current
                current, size = {}, 0
            current[name] = shape
            size += num_bytes
        yield current

    def decide(self, unverified: frozenset[str]) -> str:
        """After the first push: why later ones cannot be in place; "" where they are."""
        reason = self._engine.why_not_in_place()
        if not reason and unverified:
            reason = f"the engine's layout of {min(unverified)} is unknown"
        self.may_write_in_place = not reason
        return reason


def _only(placements: list[Placement], names: Collection[str]) -> list[Placement]:
    """What these HF tensors are made of."""
    return [
        replace(
            placement,
            parameters=tuple(
                parameter
                for parameter in placement.parameters
                if any(part.source.tensor in names for part in parameter.parts)
            ),
        )
        for placement in placements
    ]
