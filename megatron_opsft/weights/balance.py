"""Who sends which piece to whom in which round, so that all ranks have equally much to do.

Numbers only, in arrays: a large model at many ranks has millions of sends. Pure, and the same
on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_opsft.weights.reshard import Route

Integers = NDArray[np.int64]

_PIECES_PER_BUCKET = 32
_GOLDEN = 0.6180339887498949  # its multiples, modulo 1, lie evenly however many are taken


@dataclass(frozen=True, slots=True)
class Sends:
    """Which piece goes from whom to whom, [D] each, in the order in which it travels.

    round_starts: [R + 1]; round r is sends round_starts[r] to round_starts[r + 1] - 1.
    """

    pieces: NDArray[np.int32]
    senders: NDArray[np.int32]
    receivers: NDArray[np.int32]
    round_starts: Integers


def split_rows(
    bounds: Integers, itemsize: int, bucket_bytes: int
) -> tuple[Integers, Integers, Integers]:
    """Cut rectangles [C, 4] (row0, row1, col0, col1) by rows into pieces of a fraction of a bucket.

    Returns rectangle, first and last row (exclusive) of each piece, [P] each. A row is never cut.
    """
    height = bounds[:, 1] - bounds[:, 0]
    row_bytes = (bounds[:, 3] - bounds[:, 2]) * itemsize
    rows = np.maximum(1, bucket_bytes // _PIECES_PER_BUCKET // row_bytes)
    count = -(-height // rows)
    rect = np.repeat(np.arange(len(bounds)), count)
    number = np.arange(len(rect)) - np.repeat(np.cumsum(count) - count, count)
    edges = [bounds[rect, 0] + n * height[rect] // count[rect] for n in (number, number + 1)]
    return rect, edges[0], edges[1]


def assign_senders(
    routes: Sequence[Route], sizes: Sequence[Integers], world_size: int, bucket_bytes: int
) -> Sends:
    """A sender for every piece and receiver, and rounds.

    sizes: bytes of each route's pieces, which are numbered from one route to the next. Every route
    has pieces and receivers.

    Routes with few holders come first, so that what many ranks hold can even out the load. A
    receiver gets a route's pieces from as few holders as an even load allows. Every route is spread
    evenly over the whole transfer, which keeps all senders and receivers busy all the time.
    """
    loads = [0] * world_size
    columns: list[tuple[Integers, Integers, Integers, NDArray[np.float64], Integers]] = []
    num_streams = 0
    firsts = np.cumsum([0, *map(len, sizes)])
    for number in sorted(range(len(routes)), key=lambda number: len(routes[number].holders)):
        own, receivers = sizes[number], routes[number].receivers
        senders = _choose_senders(routes[number].holders, len(receivers), own, loads)
        starts = np.cumsum(own) - own
        phases = np.arange(num_streams, num_streams + len(receivers)) * _GOLDEN % 1.0
        num_streams += len(receivers)
        times = (starts + phases[:, None] * own) / own.sum()
        pieces = firsts[number] + np.arange(len(own))
        columns.append(
            (
                np.broadcast_to(pieces, senders.shape).ravel(),
                senders.ravel(),
                np.repeat(np.array(receivers), len(pieces)),
                times.ravel(),
                np.broadcast_to(own, senders.shape).ravel(),
            )
        )
    if not columns:
        none = np.zeros(0, np.int32)
        return Sends(none, none, none, np.zeros(1, np.int64))
    pieces, senders, to, times, num_bytes = map(np.concatenate, zip(*columns, strict=True))
    order = np.argsort(times, kind="stable")
    senders, to = senders[order], to[order]
    return Sends(
        pieces[order].astype(np.int32),
        senders.astype(np.int32),
        to.astype(np.int32),
        _cut_rounds(senders, to, num_bytes[order], world_size, bucket_bytes),
    )


def _choose_senders(
    holders: Sequence[int], num_receivers: int, sizes: Integers, loads: list[int]
) -> Integers:
    """[receivers, P]: who sends each piece to each receiver; adds what they send to `loads`."""
    total = int(sizes.sum())
    shares = fill_evenly([loads[rank] for rank in holders], total * num_receivers)
    senders = np.empty((num_receivers, len(sizes)), np.int64)
    number = 0
    for row in senders:
        # The holders' shares, one behind the other, are laid along the receivers' demands.
        missing, taken = total, []
        while missing:
            part = min(shares[number], missing)
            if part:
                taken.append((holders[number], part))
            shares[number] -= part
            missing -= part
            number += shares[number] == 0 and missing > 0
        if len(taken) == 1:
            row[:] = taken[0][0]
            loads[taken[0][0]] += total
        else:
            _mix(row, sizes, taken, loads)
    return senders


def _mix(row: Integers, sizes: Integers, taken: list[tuple[int, int]], loads: list[int]) -> None:
    """Fill `row` with the ranks of `taken`, each as often as its bytes say, evenly interleaved."""
    ranks = [rank for rank, _ in taken]
    fractions = [part / sum(part for _, part in taken) for _, part in taken]
    credit = [0.0] * len(taken)
    for position, size in enumerate(sizes.tolist()):
        for number, fraction in enumerate(fractions):
            credit[number] += fraction * size
        chosen = credit.index(max(credit))
        credit[chosen] -= size
        row[position] = ranks[chosen]
        loads[ranks[chosen]] += size


def fill_evenly(loads: Sequence[int], amount: int) -> list[int]:
    """How much of `amount` each gets, so that the largest of the loads ends as low as possible."""
    order = sorted(range(len(loads)), key=loads.__getitem__)
    total = amount
    for count, number in enumerate(order, start=1):
        total += loads[number]
        level, rest = divmod(total, count)
        if count == len(order) or level < loads[order[count]]:
            break
    shares = [0] * len(loads)
    for position, number in enumerate(order[:count]):
        shares[number] = level - loads[number] + (position < rest)
    return shares


def _cut_rounds(
    senders: Integers, receivers: Integers, sizes: Integers, world_size: int, bucket_bytes: int
) -> Integers:
    """A round is as many sends in a row as fit the buckets of all ranks, but at least one."""
    num_sends = len(sizes)
    ranks = np.arange(world_size)
    # Every send is two events, one for each side; below they are sorted by rank, then in order.
    sides = np.stack([senders, receivers], axis=1).ravel()
    order = np.argsort(sides, kind="stable")
    positions = np.append(order // 2, num_sends)
    keys = sides[order] * num_sends + positions[:-1]
    before = np.concatenate([[0], np.cumsum(np.repeat(sizes, 2)[order])])
    stops = np.searchsorted(sides[order], ranks, side="right")
    starts = [0]
    while starts[-1] < num_sends:
        first = np.searchsorted(keys, ranks * num_sends + starts[-1])
        full = np.searchsorted(before, before[first] + bucket_bytes, side="right") - 1
        cut = positions[np.where(full < stops, full, -1)].min()
        starts.append(max(int(cut), starts[-1] + 1))
    return np.array(starts)
