"""The transfer schedule of a reshard: which rectangle goes from which rank to which, and when.

The same function schedules a push (trainer to engine) and a pull back. Pure: every rank makes the
same schedule for its block of ranks, from who holds what, and takes its own part of it
(`Schedule.program`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from megatron_opsft.models.weights.rectangles import Copy, Rect
from megatron_opsft.models.weights.reshard import (
    Placement,
    Route,
    find_routes,
    split_into_blocks,
)
from megatron_opsft.runtime.libraries import collector_at_rest
from megatron_opsft.runtime.parts import in_parts

_PIECES_PER_BUCKET = 32


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


class Send(NamedTuple):
    """`copies`, from rectangles of HF tensors to those of parameters, go from rank to rank.

    progress: the share of their route that travels before them.
    """

    progress: float
    sender: int
    receiver: int
    copies: Sequence[Copy]
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Schedule:
    """Made by `make_schedule`; the same on every rank of the block.

    sources, targets: of the block. bytes_sent: by rank.
    """

    sources: Sequence[Placement]
    targets: Sequence[Placement]
    routes: Sequence[Route]
    rounds: Sequence[Sequence[Send]]
    bytes_sent: Mapping[int, int]

    def program(self, rank: int) -> Program:
        """What this rank of the block has to do."""
        held: dict[str, list[Copy]] = {}
        mine = [placed for placed in self.sources if rank in placed.ranks]
        for part in (
            part for placed in mine for p in placed.parameters for part in p.parts
        ):
            held.setdefault(part.source.tensor, []).append(part)
        copies = tuple(
            Copy(_locate(held, copy.source), copy.target)
            for route in self.routes
            if rank in route.local
            for copy in route.copies
        )
        zeros = tuple(
            parameter.padding
            for placed in self.targets
            if rank in placed.ranks
            for parameter in placed.parameters
            if parameter.padding.num_elements
        )
        return Program(
            copies, tuple(_round_of(rank, sends, held) for sends in self.rounds), zeros
        )


@collector_at_rest()  # of a large job: 300,000 objects, half of the time
def make_schedule(
    sources: Sequence[Placement],
    targets: Sequence[Placement],
    *,
    rank: int,
    itemsize: int,
    bucket_bytes: int,
) -> Schedule:
    """How the target parameters in the block of `rank` are filled from the sources.

    A rank that holds what it wants copies it; everything else travels once, straight from that of
    its holders which has sent least. sources, targets: every rank is in one placement of each side.
    itemsize: of every parameter. bucket_bytes: no rank sends and receives more in one round (except
    where a single row of a copy is larger: it has a round of its own).
    Errors: as of `find_routes`.
    """
    own = next(block for block in split_into_blocks(sources, targets) if rank in block)
    sources, targets = (
        [
            replace(placed, ranks=tuple(r for r in placed.ranks if r in own))
            for placed in side
        ]
        for side in (sources, targets)
    )
    routes = find_routes(sources, targets)
    sent = dict.fromkeys(own, 0)
    sends: list[Send] = []
    # What many ranks hold comes last and evens out the load.
    for route in sorted(routes, key=lambda route: len(route.holders)):
        sends += _choose_senders(
            route, sent, itemsize, bucket_bytes // _PIECES_PER_BUCKET
        )
    # All routes begin and end together, which keeps senders and receivers busy all the time.
    sends.sort(key=attrgetter("progress"))
    return Schedule(
        sources=sources,
        targets=targets,
        routes=routes,
        rounds=_cut_rounds(sends, bucket_bytes),
        bytes_sent=sent,
    )


def _choose_senders(
    route: Route, sent: dict[int, int], itemsize: int, piece_bytes: int
) -> Iterator[Send]:
    """Each piece for each receiver; adds the bytes of each to its sender's in `sent`."""
    # Holders begin with different receivers: those behind them.
    receivers = sorted(
        route.receivers, key=lambda rank: (rank < route.holders[0], rank)
    )
    if not receivers:
        return
    most = piece_bytes // itemsize
    parts = (part for copy in route.copies for part in split_rows(copy, most))
    pieces = in_parts(parts, lambda part: part.source.num_elements, most)
    for number, piece in enumerate(pieces):
        num_bytes = itemsize * sum(part.source.num_elements for part in piece)
        for place, receiver in enumerate(receivers):
            sender = min(route.holders, key=sent.__getitem__)
            sent[sender] += num_bytes
            progress = (number + place / len(receivers)) / len(pieces)
            yield Send(progress, sender, receiver, piece, num_bytes)


def split_rows(copy: Copy, most: int) -> Iterator[Copy]:
    """In pieces of about equally many rows, each of at most `most` elements or a single row."""
    rect = copy.source
    height, width = rect.row1 - rect.row0, rect.col1 - rect.col0
    count = -(-height // max(1, most // width))
    if count == 1:
        yield copy
        return
    edges = [rect.row0 + index * height // count for index in range(count + 1)]
    for row0, row1 in pairwise(edges):
        piece = copy.cut(rect._replace(row0=row0, row1=row1))
        assert piece is not None
        yield piece


def _cut_rounds(sends: Sequence[Send], bucket_bytes: int) -> list[list[Send]]:
    """A round is as many sends in a row as fit the buckets of all ranks, but at least one."""
    rounds: list[list[Send]] = []
    used: dict[int, int] = {}
    for send in sends:
        _, sender, receiver, _, num_bytes = send
        after = used.get(sender, 0) + num_bytes, used.get(receiver, 0) + num_bytes
        if not rounds or max(after) > bucket_bytes:
            rounds.append([])
            used, after = {}, (num_bytes, num_bytes)
        rounds[-1].append(send)
        used[sender], used[receiver] = after
    return rounds


def _round_of(
    rank: int, sends: Sequence[Send], held: Mapping[str, Sequence[Copy]]
) -> Round:
    """A rank's part of a round; held: HF name -> what the rank holds of it."""
    out: dict[int, list[Rect]] = {}
    into: dict[int, list[Rect]] = {}
    for send in sends:
        if send.sender == rank:
            located = [_locate(held, copy.source) for copy in send.copies]
            out.setdefault(send.receiver, []).extend(located)
        elif send.receiver == rank:
            into.setdefault(send.sender, []).extend(copy.target for copy in send.copies)
    return Round(
        {peer: tuple(rects) for peer, rects in out.items()},
        {peer: tuple(rects) for peer, rects in into.items()},
    )


def _locate(held: Mapping[str, Sequence[Copy]], rect: Rect) -> Rect:
    """Where a holder has a rectangle of an HF tensor, which lies in one of its parts."""
    return next(
        cut.target for part in held[rect.tensor] if (cut := part.cut(rect)) is not None
    )
