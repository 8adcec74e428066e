"""Who sends which piece to whom in which round, so that all ranks have equally much to do.

Numbers only, in arrays: a large model at many ranks has millions of deliveries. Pure, and the same
on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

_PIECES_PER_BUCKET = 32
_GOLDEN = 0.6180339887498949  # its multiples, modulo 1, lie evenly however many are taken


@dataclass(frozen=True, slots=True)
class Stock:
    """Pieces that the same ranks hold and the same other ranks want.

    holders, receivers: global ranks, ascending. first: number of the first piece; sizes: bytes of
    each, [P].
    """

    holders: tuple[int, ...]
    receivers: tuple[int, ...]
    first: int
    sizes: Integers


@dataclass(frozen=True, slots=True)
class Deliveries:
    """Which piece goes from whom to whom, [D] each, in the order in which it travels.

    round_starts: [R + 1]; round r is deliveries round_starts[r] to round_starts[r + 1] - 1.
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
    cell = np.repeat(np.arange(len(bounds)), count)
    number = np.arange(len(cell)) - np.repeat(np.cumsum(count) - count, count)
    edges = [bounds[cell, 0] + n * height[cell] // count[cell] for n in (number, number + 1)]
    return cell, edges[0], edges[1]


def deal(stocks: Sequence[Stock], world_size: int, bucket_bytes: int) -> Deliveries:
    """A sender for every piece and receiver, and rounds.

    Stocks that few ranks hold are dealt first, so that what many ranks hold can even out the load.
    A receiver gets a stock's pieces from as few holders as an even load allows. Every stock is
    spread evenly over the whole transfer, which keeps all senders and receivers busy all the time.
    """
    loads = [0] * world_size
    columns: list[tuple[Integers, Integers, Integers, NDArray[np.float64], Integers]] = []
    num_streams = 0
    for stock in sorted(stocks, key=lambda stock: len(stock.holders)):
        senders = _choose_senders(stock, loads)
        starts = np.cumsum(stock.sizes) - stock.sizes
        phases = np.arange(num_streams, num_streams + len(stock.receivers)) * _GOLDEN % 1.0
        num_streams += len(stock.receivers)
        times = (starts + phases[:, None] * stock.sizes) / stock.sizes.sum()
        pieces = stock.first + np.arange(len(stock.sizes))
        columns.append(
            (
                np.broadcast_to(pieces, senders.shape).ravel(),
                senders.ravel(),
                np.repeat(np.array(stock.receivers), len(pieces)),
                times.ravel(),
                np.broadcast_to(stock.sizes, senders.shape).ravel(),
            )
        )
    if not columns:
        none = np.zeros(0, np.int32)
        return Deliveries(none, none, none, np.zeros(1, np.int64))
    pieces, senders, receivers, times, sizes = map(np.concatenate, zip(*columns, strict=True))
    order = np.argsort(times, kind="stable")
    senders, receivers = senders[order], receivers[order]
    return Deliveries(
        pieces[order].astype(np.int32),
        senders.astype(np.int32),
        receivers.astype(np.int32),
        _cut_rounds(senders, receivers, sizes[order], world_size, bucket_bytes),
    )


def _choose_senders(stock: Stock, loads: list[int]) -> Integers:
    """[receivers, P]: who sends each piece to each receiver; adds what they send to `loads`."""
    total = int(stock.sizes.sum())
    shares = fill_evenly([loads[rank] for rank in stock.holders], total * len(stock.receivers))
    senders = np.empty((len(stock.receivers), len(stock.sizes)), np.int64)
    number = 0
    for row in senders:
        # The holders' shares, one behind the other, are laid along the receivers' demands.
        missing, taken = total, []
        while missing:
            part = min(shares[number], missing)
            if part:
                taken.append((stock.holders[number], part))
            shares[number] -= part
            missing -= part
            number += shares[number] == 0 and missing > 0
        if len(taken) == 1:
            row[:] = taken[0][0]
            loads[taken[0][0]] += total
        else:
            _mix(row, stock.sizes, taken, loads)
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


def lower_bound(stocks: Sequence[Stock]) -> int:
    """Bytes that some rank must send, however the pieces are dealt.

    For a set S of ranks let B(S) be the bytes of all stocks whose holders are in S, once for each
    receiver: nobody else can send them, so some rank of S sends B(S) / |S| or more. The result is
    the largest such quotient over the holder sets of all stocks and over all holders together.
    Where holder sets are nested or disjoint, dealing in fractions of a byte would reach it.
    """
    needs: dict[frozenset[int], int] = {}
    for stock in stocks:
        holders = frozenset(stock.holders)
        size = int(stock.sizes.sum()) * len(stock.receivers)
        needs[holders] = needs.get(holders, 0) + size
    sets = [*needs, frozenset[int]().union(*needs)] if needs else []
    return max((-(-sum(b for o, b in needs.items() if o <= s) // len(s)) for s in sets), default=0)


def _cut_rounds(
    senders: Integers, receivers: Integers, sizes: Integers, world_size: int, bucket_bytes: int
) -> Integers:
    """A round is as many deliveries in a row as fit the buckets of all ranks, but at least one."""
    num_deliveries = len(sizes)
    ranks = np.arange(world_size)
    # Every delivery is two events, one for each side; below they are sorted by rank, then in order.
    sides = np.stack([senders, receivers], axis=1).ravel()
    order = np.argsort(sides, kind="stable")
    positions = np.append(order // 2, num_deliveries)
    keys = sides[order] * num_deliveries + positions[:-1]
    before = np.concatenate([[0], np.cumsum(np.repeat(sizes, 2)[order])])
    stops = np.searchsorted(sides[order], ranks, side="right")
    starts = [0]
    while starts[-1] < num_deliveries:
        first = np.searchsorted(keys, ranks * num_deliveries + starts[-1])
        full = np.searchsorted(before, before[first] + bucket_bytes, side="right") - 1
        cut = positions[np.where(full < stops, full, -1)].min()
        starts.append(max(int(cut), starts[-1] + 1))
    return np.array(starts)
