"""The transfer schedule of a reshard: which rectangle goes from which rank to which, and when.

Pure: every rank makes the same schedule from who holds what, and takes its own part of it
(`Schedule.program`). The same function schedules the push (trainer to engine) and the pull back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_opsft.weights.balance import Integers, Sends, assign_senders, split_rows
from megatron_opsft.weights.blocks import Members, split_into_blocks, within_block
from megatron_opsft.weights.rectangles import Copy, Rect
from megatron_opsft.weights.reshard import Placement, Route, find_routes


@dataclass(frozen=True, slots=True)
class Round:
    """What one rank sends and receives at the same time, by peer.

    A message is the rectangles of parameters one behind the other, each row-major; sender and
    receiver list them in the same order.
    """

    sends: Mapping[int, tuple[Rect, ...]]
    receives: Mapping[int, tuple[Rect, ...]]


@dataclass(frozen=True, slots=True)
class Program:
    """One rank's part of a schedule: `rounds` in order, and the rest at any time.

    copies: between the rank's own parameters. zeros: vocabulary padding of the targets. Every rank
    has the same number of rounds.
    """

    copies: tuple[Copy, ...]
    rounds: tuple[Round, ...]
    zeros: tuple[Rect, ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Schedule:
    """Made by `make_schedule`; the same on every rank.

    bytes_sent, bytes_received, bytes_local: of each rank; local is what it copies from itself.
    What begins with an underscore is of one block of ranks, whose members have numbers.
    """

    bytes_sent: tuple[int, ...]
    bytes_received: tuple[int, ...]
    bytes_local: tuple[int, ...]
    _members: Members
    _sources: Sequence[Placement]
    _targets: Sequence[Placement]
    _routes: tuple[Route, ...]
    _pieces: "_Pieces"
    _sends: Sends

    @property
    def num_rounds(self) -> int:
        return len(self._sends.round_starts) - 1

    def program(self, rank: int) -> Program:
        """What this rank has to do."""
        places = np.argwhere(self._members == rank).tolist()
        block, number = places[0] if places else (0, -1)  # -1: holds nothing, wants nothing
        own = self._program(number)
        peers = self._members[block].tolist()
        rounds = tuple(
            Round(
                {peers[other]: rects for other, rects in each.sends.items()},
                {peers[other]: rects for other, rects in each.receives.items()},
            )
            for each in own.rounds
        )
        return replace(own, rounds=rounds)

    def _program(self, rank: int) -> Program:
        held = _held_parts(self._sources, rank)
        copies = tuple(
            Copy(_locate(held, copy.source), copy.target)
            for route in self._routes
            if rank in route.local
            for copy in route.copies
        )
        zeros = tuple(
            padding
            for placement in self._targets
            if rank in placement.ranks
            for padding in _padding(placement)
        )
        return Program(copies, self._rounds(rank, held), zeros)

    def _rounds(self, rank: int, held: Mapping[str, Sequence[Copy]]) -> tuple[Round, ...]:
        every = self._sends
        own = np.flatnonzero((every.senders == rank) | (every.receivers == rank))
        numbers = np.searchsorted(every.round_starts, own, side="right") - 1
        columns = (numbers, every.senders[own], every.receivers[own], every.pieces[own])
        sends: list[dict[int, list[Rect]]] = [{} for _ in range(self.num_rounds)]
        receives: list[dict[int, list[Rect]]] = [{} for _ in range(self.num_rounds)]
        for number, sender, receiver, piece in zip(*(c.tolist() for c in columns), strict=True):
            copy = self._pieces.at(piece)
            if sender == rank:
                sends[number].setdefault(receiver, []).append(_locate(held, copy.source))
            else:
                receives[number].setdefault(sender, []).append(copy.target)
        return tuple(
            Round(
                {peer: tuple(rects) for peer, rects in out.items()},
                {peer: tuple(rects) for peer, rects in into.items()},
            )
            for out, into in zip(sends, receives, strict=True)
        )


class _Pieces:
    """All copies that travel, cut by rows so that a piece is a small part of a bucket."""

    def __init__(self, routes: Sequence[Route], itemsize: int, bucket_bytes: int) -> None:
        self._copies = [copy for route in routes for copy in route.copies]
        rects = [copy.source for copy in self._copies]
        corners = [(r.row0, r.row1, r.col0, r.col1) for r in rects]
        bounds = np.array(corners, dtype=np.int64).reshape(-1, 4)
        self._copy, self._row0, self._row1 = split_rows(bounds, itemsize, bucket_bytes)
        width = (bounds[:, 3] - bounds[:, 2])[self._copy]
        self.num_bytes: Integers = (self._row1 - self._row0) * width * itemsize
        ends = np.cumsum([len(route.copies) for route in routes], dtype=np.int64)
        self.sizes = np.split(self.num_bytes, np.searchsorted(self._copy, ends[:-1]))

    def at(self, piece: int) -> Copy:
        """From an HF tensor to a target."""
        copy = self._copies[self._copy[piece]]
        rows = replace(copy.source, row0=int(self._row0[piece]), row1=int(self._row1[piece]))
        cut = copy.cut(rows)
        assert cut is not None
        return cut


def make_schedule(
    sources: Sequence[Placement],
    targets: Sequence[Placement],
    *,
    itemsize: int,
    world_size: int,
    bucket_bytes: int,
) -> Schedule:
    """How every target parameter is filled from the sources.

    A rank that holds what it wants copies it; everything else travels once, straight from one of
    its holders. sources, targets: no rank is in two placements of the same side; one may be in
    none. itemsize: of every parameter. bucket_bytes: no rank sends and receives more in one round
    (except where a single row of a copy is larger: it has a round of its own).
    Errors: ValueError that names the tensor, where the sources do not hold all that the targets
    want or overlap; where ranks are out of range or listed twice.
    """
    for placements in (sources, targets):
        ranks = [rank for placement in placements for rank in placement.ranks]
        if len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(world_size)):
            raise ValueError(f"ranks {sorted(ranks)} are listed twice or not of {world_size}")
    members = split_into_blocks(sources, targets)
    sources, targets = within_block(sources, members), within_block(targets, members)
    routes = find_routes(sources, targets)
    travelling = [route for route in routes if route.receivers]
    pieces = _Pieces(travelling, itemsize, bucket_bytes)
    sends = assign_senders(travelling, pieces.sizes, members.shape[1], bucket_bytes)
    sizes = pieces.num_bytes[sends.pieces]
    local = [(rank, route.num_elements * itemsize) for route in routes for rank in route.local]
    local_ranks, local_sizes = np.array(local, dtype=np.int64).reshape(-1, 2).T
    return Schedule(
        bytes_sent=_sum_by(sends.senders, sizes, members, world_size),
        bytes_received=_sum_by(sends.receivers, sizes, members, world_size),
        bytes_local=_sum_by(local_ranks, local_sizes, members, world_size),
        _members=members,
        _sources=sources,
        _targets=targets,
        _routes=routes,
        _pieces=pieces,
        _sends=sends,
    )


def _sum_by(
    numbers: NDArray[Any], num_bytes: Integers, members: Members, world_size: int
) -> tuple[int, ...]:
    """Of each rank of the world, from sums over the numbers in a block."""
    sums = np.zeros(world_size, np.int64)
    # Exact below 2^53.
    sums[members] = np.bincount(numbers, weights=num_bytes, minlength=members.shape[1])
    return tuple(sums.tolist())


def _held_parts(sources: Sequence[Placement], rank: int) -> dict[str, list[Copy]]:
    """HF name -> what the rank holds of it."""
    held: dict[str, list[Copy]] = {}
    for placement in sources:
        if rank in placement.ranks:
            for parameter in placement.parameters:
                for part in parameter.parts:
                    held.setdefault(part.source.tensor, []).append(part)
    return held


def _locate(held: Mapping[str, Sequence[Copy]], rect: Rect) -> Rect:
    """Where a holder has a rectangle of an HF tensor, which lies in one of its parts."""
    return next(cut.target for part in held[rect.tensor] if (cut := part.cut(rect)) is not None)


def _padding(placement: Placement) -> tuple[Rect, ...]:
    """The vocabulary padding in a placement's parameters."""
    return tuple(
        Rect(parameter.name, parameter.padding_row, parameter.shape[0], 0, columns)
        for parameter in placement.parameters
        for columns in [*parameter.shape[1:], 1][:1]
        if len(parameter.shape) < 3 and parameter.padding_row < parameter.shape[0]
    )
