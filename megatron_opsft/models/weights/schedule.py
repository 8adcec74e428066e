"""The transfer schedule of a reshard: which rectangle goes from which rank to which, and when.

The same functions schedule a push (trainer to engine) and a pull (engine to trainer). Only names
and numbers: every rank schedules all sends of its block of ranks, as each other rank of the block
does, and takes its own part.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from operator import attrgetter
from typing import NamedTuple

from megatron_opsft.models.weights.rectangles import Copy, Rect
from megatron_opsft.models.weights.reshard import (
    Placement,
    Ranks,
    find_copies,
    restrict,
    split_into_blocks,
)
from megatron_opsft.records import record
from megatron_opsft.runtime.libraries import collector_at_rest
from megatron_opsft.runtime.parts import in_parts
from megatron_opsft.runtime.rounding import ceil_div

_PIECES_PER_BUCKET = 32


class Send(NamedTuple):
    """Copies that travel together from one rank to another."""

    progress: float
    """Share of the copies between the same holders and receivers that travel before these."""
    sender: int
    receiver: int
    copies: Sequence[Copy]
    """Copies from rectangles of HF tensors to parameters of the receiver."""
    num_bytes: int


@record
class RankSchedule:
    """What one rank does to fill the targets of its block."""

    copies: Sequence[Copy]
    """Copies between the rank's own parameters, at any time."""
    zeros: Sequence[Rect]
    """Vocabulary padding of the rank's targets, to be filled with zeros at any time."""
    sends: Sequence[Mapping[int, Sequence[Rect]]]
    """For each round: receiver -> rectangles of source parameters. Every rank of the block has the
    same number of rounds. Sender and receiver list the rectangles of a round in the same order.
    """
    receives: Sequence[Mapping[int, Sequence[Rect]]]
    """For each round: sender -> rectangles of target parameters."""
    bytes_sent: Mapping[int, int]
    """Bytes that each rank of the block sends in all rounds."""


@collector_at_rest()  # collecting among a large job's 300,000 objects doubles the time
def make_schedule(
    sources: Sequence[Placement],
    targets: Sequence[Placement],
    *,
    rank: int,
    itemsize: int,
    bucket_bytes: int,
) -> RankSchedule:
    """Schedule how the target parameters in the block of `rank` are filled from the sources. A
    block is a group of ranks that needs nothing from the others, see `split_into_blocks`.

    A rank that holds what it wants copies it. Everything else travels once, straight from the
    holder that has sent least so far.

    sources, targets: every rank is in one placement of each.
    itemsize: bytes of an element, the same for every parameter.
    bucket_bytes: most bytes that a rank sends and receives in one round. Only a single row of a
    copy may be larger; it gets a round of its own.
    Errors: as of `find_copies`.
    """
    blocks = split_into_blocks(sources, targets)
    block = next(block for block in blocks if rank in block)
    sources, targets = restrict(sources, block), restrict(targets, block)
    copies = find_copies(sources, targets)
    rounds, bytes_sent = plan_rounds(
        copies, itemsize=itemsize, bucket_bytes=bucket_bytes
    )

    # HF tensor -> where this rank holds parts of it.
    holdings: dict[str, list[Copy]] = defaultdict(list)
    for placement in restrict(sources, {rank}):
        for copy in placement.copies():
            holdings[copy.source.tensor].append(copy)
    parts = [_part_of(rank, sends_of_round, holdings) for sends_of_round in rounds]
    return RankSchedule(
        copies=_local_copies(rank, copies, holdings),
        zeros=_padding_of(rank, targets),
        sends=[outgoing for outgoing, _ in parts],
        receives=[incoming for _, incoming in parts],
        bytes_sent={peer: bytes_sent[peer] for peer in block},
    )


def _local_copies(
    rank: int,
    copies: Mapping[tuple[Ranks, Ranks], Sequence[Copy]],
    holdings: Mapping[str, Sequence[Copy]],
) -> list[Copy]:
    """Return the copies from a parameter of this rank to another of its parameters.

    copies: (ranks that hold the source, ranks that want it) -> copies from rectangles of HF tensors
    to parameters. holdings: HF tensor -> which parts of it this rank's source parameters hold.
    """
    local = []
    for (holders, wanting), group in copies.items():
        if rank in holders and rank in wanting:
            for copy in group:
                in_own_parameter = _locate(copy.source, holdings)
                local.append(Copy(in_own_parameter, copy.target))
    return local


def _padding_of(rank: int, targets: Sequence[Placement]) -> list[Rect]:
    """Return the rows of vocabulary padding in the parameters that this rank fills."""
    padding = []
    for placement in restrict(targets, {rank}):
        for parameter in placement.parameters:
            if parameter.padding.num_elements:
                padding.append(parameter.padding)
    return padding


def plan_rounds(
    copies: Mapping[tuple[Ranks, Ranks], Sequence[Copy]],
    *,
    itemsize: int,
    bucket_bytes: int,
) -> tuple[list[list[Send]], Counter[int]]:
    """Choose a sender for everything that travels within a block, and the order of all sends.

    copies: those of the block, as `find_copies` returns them.
    Returns the sends of each round, and the bytes that each rank sends.
    """
    bytes_sent = Counter[int]()
    sends = []
    max_elements = bucket_bytes // _PIECES_PER_BUCKET // itemsize
    # What many ranks hold comes last and evens out the load.
    for holders, wanting in sorted(copies, key=lambda ranks: len(ranks[0])):
        group = copies[holders, wanting]
        # Starting behind the first holder lets different holders begin with different receivers.
        receivers = sorted(
            set(wanting) - set(holders), key=lambda rank: (rank < holders[0], rank)
        )
        if not receivers:
            continue
        # Large copies are cut, small ones travel together.
        strips = chain.from_iterable(split_rows(copy, max_elements) for copy in group)
        pieces = in_parts(strips, attrgetter("source.num_elements"), max_elements)
        for number, piece in enumerate(pieces):
            num_bytes = itemsize * sum(copy.source.num_elements for copy in piece)
            for position, receiver in enumerate(receivers):
                sender = min(holders, key=bytes_sent.__getitem__)  # has sent least
                bytes_sent[sender] += num_bytes
                progress = (number + position / len(receivers)) / len(pieces)
                sends.append(
                    Send(
                        progress,
                        sender,
                        receiver,
                        piece,
                        num_bytes,
                    )
                )
    # All groups begin and end together, which keeps senders and receivers busy all the time.
    sends.sort(key=attrgetter("progress"))
    return _cut_rounds(sends, bucket_bytes), bytes_sent


def split_rows(copy: Copy, max_elements: int) -> Iterator[Copy]:
    """Cut a copy into strips of about equally many rows, each of at most `max_elements` elements or
    a single row.
    """
    rect = copy.source
    height, width = rect.row1 - rect.row0, rect.col1 - rect.col0
    num_strips = ceil_div(height, max(1, max_elements // width))
    edges = [
        rect.row0 + index * height // num_strips for index in range(num_strips + 1)
    ]
    for row0, row1 in pairwise(edges):
        strip = copy.cut(rect._replace(row0=row0, row1=row1))
        assert strip is not None
        yield strip


def _cut_rounds(sends: Sequence[Send], bucket_bytes: int) -> list[list[Send]]:
    """Cut the sends into rounds: as many in a row as fit the buckets of all ranks, at least one."""
    rounds: list[list[Send]] = []
    used = Counter[int]()
    for send in sends:
        busiest = max(used[send.sender], used[send.receiver])
        if not rounds or busiest + send.num_bytes > bucket_bytes:
            rounds.append([])
            used.clear()
        rounds[-1].append(send)
        used[send.sender] += send.num_bytes
        used[send.receiver] += send.num_bytes
    return rounds


def _part_of(
    rank: int, sends: Sequence[Send], holdings: Mapping[str, Sequence[Copy]]
) -> tuple[Mapping[int, Sequence[Rect]], Mapping[int, Sequence[Rect]]]:
    """Return the part of a rank in a round: receiver -> rectangles of the rank's parameters that go
    to it; sender -> rectangles of the rank's parameters that it fills.
    """
    outgoing: dict[int, list[Rect]] = defaultdict(list)
    incoming: dict[int, list[Rect]] = defaultdict(list)
    for send in sends:
        if send.sender == rank:
            rects = [_locate(copy.source, holdings) for copy in send.copies]
            outgoing[send.receiver] += rects
        elif send.receiver == rank:
            incoming[send.sender] += [copy.target for copy in send.copies]
    return outgoing, incoming


def _locate(rect: Rect, holdings: Mapping[str, Sequence[Copy]]) -> Rect:
    """Return where a rank holds a rectangle of an HF tensor.

    holdings: HF name -> copies from it to the rank's parameters; `rect` lies in one of them.
    """
    for copy in holdings[rect.tensor]:
        cut = copy.cut(rect)
        if cut is not None:
            return cut.target
    raise ValueError(f"the rank does not hold {rect}")
