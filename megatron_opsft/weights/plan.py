"""The plan of a reshard: which slice of which parameter goes from which rank to which, and when.

Pure: every rank makes the same plan from who holds what, and takes its own part of it
(`Plan.program`). The same function plans the push (trainer to engine) and the pull back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_opsft.weights.cells import Cell, Group, Sources, find_groups
from megatron_opsft.weights.dealing import (
    Deliveries,
    Integers,
    Stock,
    deal,
    lower_bound,
    split_rows,
)
from megatron_opsft.weights.layouts import Holding, Rect, Slice

__all__ = ["Plan", "Program", "Round", "Slice", "make_plan"]


@dataclass(frozen=True, slots=True)
class Round:
    """What one rank sends and receives at the same time, by peer.

    A message is the slices one behind the other, each row-major; sender and receiver list them in
    the same order.
    """

    sends: Mapping[int, tuple[Slice, ...]]
    receives: Mapping[int, tuple[Slice, ...]]


@dataclass(frozen=True, slots=True)
class Program:
    """One rank's part of a plan: `rounds` in order, and the rest at any time.

    copies: (source, target) of what the rank has itself. zeros: vocabulary padding of the targets.
    Every rank has the same number of rounds.
    """

    copies: tuple[tuple[Slice, Slice], ...]
    rounds: tuple[Round, ...]
    zeros: tuple[Slice, ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Plan:
    """Made by `make_plan`; the same on every rank.

    bytes_sent, bytes_received, bytes_local: of each rank; local is what it copies from itself.
    lower_bound_bytes: no plan in which bytes go straight from a rank that has them to one that
    wants them can have a smaller largest `bytes_sent`; see `dealing.lower_bound`.
    """

    bytes_sent: tuple[int, ...]
    bytes_received: tuple[int, ...]
    bytes_local: tuple[int, ...]
    lower_bound_bytes: int
    _groups: tuple[Group, ...]
    _sources: Sources
    _padding: Mapping[int, tuple[Slice, ...]]
    _pieces: "_Pieces"
    _deliveries: Deliveries

    @property
    def num_rounds(self) -> int:
        return len(self._deliveries.round_starts) - 1

    def program(self, rank: int) -> Program:
        """What this rank has to do."""
        copies = tuple(
            (self._sources.locate(cell, cell.rect, rank), cell.target(cell.rect))
            for group in self._groups
            if rank in group.local
            for cell in group.cells
        )
        return Program(copies, self._rounds(rank), self._padding.get(rank, ()))

    def _rounds(self, rank: int) -> tuple[Round, ...]:
        all_of = self._deliveries
        own = np.flatnonzero((all_of.senders == rank) | (all_of.receivers == rank))
        numbers = np.searchsorted(all_of.round_starts, own, side="right") - 1
        columns = (numbers, all_of.senders[own], all_of.receivers[own], all_of.pieces[own])
        sends: list[dict[int, list[Slice]]] = [{} for _ in range(self.num_rounds)]
        receives: list[dict[int, list[Slice]]] = [{} for _ in range(self.num_rounds)]
        for number, sender, receiver, piece in zip(*(c.tolist() for c in columns), strict=True):
            cell, rect = self._pieces.at(piece)
            if sender == rank:
                place = self._sources.locate(cell, rect, rank)
                sends[number].setdefault(receiver, []).append(place)
            else:
                receives[number].setdefault(sender, []).append(cell.target(rect))
        return tuple(
            Round(
                {peer: tuple(slices) for peer, slices in out.items()},
                {peer: tuple(slices) for peer, slices in into.items()},
            )
            for out, into in zip(sends, receives, strict=True)
        )


class _Pieces:
    """All cells that travel, cut by rows so that a piece is a small part of a bucket."""

    def __init__(self, groups: Sequence[Group], itemsize: int, bucket_bytes: int) -> None:
        self._cells = [cell for group in groups for cell in group.cells]
        rects = [cell.rect for cell in self._cells]
        corners = [(r.row0, r.row1, r.col0, r.col1) for r in rects]
        bounds = np.array(corners, dtype=np.int64).reshape(-1, 4)
        self._cell, self._row0, self._row1 = split_rows(bounds, itemsize, bucket_bytes)
        width = (bounds[:, 3] - bounds[:, 2])[self._cell]
        self.num_bytes: Integers = (self._row1 - self._row0) * width * itemsize
        ends = np.cumsum([len(group.cells) for group in groups], dtype=np.int64)
        piece_ends = np.searchsorted(self._cell, ends).tolist()
        self.stocks = [
            Stock(group.holders, group.receivers, first, self.num_bytes[first:stop])
            for group, first, stop in zip(groups, [0, *piece_ends], piece_ends, strict=False)
        ]

    def at(self, piece: int) -> tuple[Cell, Rect]:
        """The cell that a piece is of, and the piece's own rectangle of the HF tensor."""
        cell = self._cells[self._cell[piece]]
        row0, row1 = int(self._row0[piece]), int(self._row1[piece])
        return cell, Rect(row0, row1, cell.rect.col0, cell.rect.col1)


def make_plan(
    sources: Sequence[Holding],
    targets: Sequence[Holding],
    *,
    itemsize: int,
    world_size: int,
    bucket_bytes: int,
) -> Plan:
    """How every target parameter is filled from the sources.

    A rank that holds what it wants copies it; everything else travels once, straight from one of
    its holders. sources, targets: no rank is in two holdings of the same side; one may be in none.
    itemsize: of every parameter. bucket_bytes: no rank sends and receives more in one round (except
    where a single row of a cell is larger: it has a round of its own).
    Errors: ValueError that names the tensor, where the sources do not hold all that the targets
    want or overlap; where ranks are out of range or listed twice.
    """
    for holdings in (sources, targets):
        ranks = [rank for holding in holdings for rank in holding.ranks]
        if len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(world_size)):
            raise ValueError(f"ranks {sorted(ranks)} are listed twice or not of {world_size}")
    index = Sources(sources)
    groups = find_groups(sources, index, targets)
    pieces = _Pieces([group for group in groups if group.receivers], itemsize, bucket_bytes)
    deliveries = deal(pieces.stocks, world_size, bucket_bytes)
    travelling = pieces.num_bytes[deliveries.pieces]
    local = [0] * world_size
    for group in groups:
        for rank in group.local:
            local[rank] += group.num_elements * itemsize
    return Plan(
        bytes_sent=_sum_by(deliveries.senders, travelling, world_size),
        bytes_received=_sum_by(deliveries.receivers, travelling, world_size),
        bytes_local=tuple(local),
        lower_bound_bytes=lower_bound(pieces.stocks),
        _groups=groups,
        _sources=index,
        _padding={rank: _padding(h) for h in targets for rank in h.ranks},
        _pieces=pieces,
        _deliveries=deliveries,
    )


def _sum_by(ranks: NDArray[np.int32], num_bytes: Integers, world_size: int) -> tuple[int, ...]:
    sums = np.bincount(ranks, weights=num_bytes, minlength=world_size)  # exact below 2^53
    return tuple(sums.astype(np.int64).tolist())


def _padding(holding: Holding) -> tuple[Slice, ...]:
    """The vocabulary padding in a holding's parameters."""
    return tuple(
        Slice(parameter.name, None, parameter.padding_row, parameter.shape[0], 0, columns)
        for parameter in holding.parameters
        for columns in [*parameter.shape[1:], 1][:1]
        if len(parameter.shape) < 3 and parameter.padding_row < parameter.shape[0]
    )
