"""Sequences into micro-batches: packed (THD) to a token budget, the same number on every rank.

Pure and deterministic: every rank makes the whole plan and builds its own part of it
(`microbatch.pack`). First-fit says how few bins will do. The sequences then go, longest first, to
the rank of the least cost that has room, and there into the cheapest bin with room.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import count

Bin = list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingReport:
    """How good a plan is, or several that run one after the other; all 0 without sequences."""

    num_tokens: int = 0  # in all bins, without padding
    room: int = 0  # of all bins; of a lone longer sequence it is its length
    mean_cost: float = 0.0  # of the ranks
    cost_spread: float = 0.0  # of the costliest rank, less that of the cheapest
    num_bins: int = 0  # over all ranks, empty ones included

    @property
    def fill(self) -> float:
        """The share of the room that tokens take."""
        return self.num_tokens / self.room if self.room else 0.0

    @property
    def imbalance(self) -> float:
        """(most - least) / mean of the ranks' cost."""
        return self.cost_spread / self.mean_cost if self.mean_cost else 0.0


def whole_packing(reports: Sequence[PackingReport]) -> PackingReport:
    """Of updates that follow each other; ranks wait for each other at the end of each."""
    return PackingReport(
        num_tokens=sum(report.num_tokens for report in reports),
        room=sum(report.room for report in reports),
        mean_cost=sum(report.mean_cost for report in reports),
        cost_spread=sum(report.cost_spread for report in reports),
        num_bins=sum(report.num_bins for report in reports),
    )


def sequence_cost(num_tokens: int, quadratic_at: float) -> float:
    """Relative compute of one sequence: linear part plus attention's square.

    `quadratic_at`: the length in tokens at which attention costs as much as all the rest.
    """
    return num_tokens * (1.0 + num_tokens / quadratic_at)


def plan_packing(
    lengths: Sequence[int],
    *,
    budget: int,
    dp_size: int,
    multiple: int = 1,
    quadratic_at: float = 8192.0,
) -> list[list[Bin]]:
    """For each data-parallel rank its bins of indices into `lengths`; equally many for each rank.

    A bin has at most `budget` tokens, or one longer sequence. The number per rank is the least that
    first-fit needs, or the next in which all find room, as a multiple of `multiple` (interleaved
    1F1B needs that of the pipeline size); a bin may be empty, which becomes a micro-batch of
    padding. Ranks are balanced by `sequence_cost`; each has its costliest bin first, so that
    expert-parallel ranks, which wait for each other in every micro-batch, work on alike ones.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    cost = [sequence_cost(length, quadratic_at) for length in lengths]
    least = -(-_first_fit(lengths, order, budget) // (dp_size * multiple)) * multiple
    sizes = count(least, multiple)
    ranks = next(
        filter(None, (_spread(lengths, cost, order, budget, dp_size, n) for n in sizes))
    )
    for bins in ranks:
        bins.sort(key=lambda indices: -sum(cost[i] for i in indices))
    return ranks


class _Bins:
    """Bins that are asked for a place again and again, by sequences that come longest first.

    So a bin that has room keeps it until something is put into it, and each sequence moves few
    bins between the two heaps.
    """

    def __init__(self) -> None:
        self.room: list[int] = []
        self._roomy: list[
            tuple[float, int]
        ] = []  # a heap of (cost, bin); room is checked on top
        self._full: list[
            tuple[int, int, float]
        ] = []  # of (-room, bin, cost): too small for now

    def add(self, room: int) -> None:
        """One bin more, of no cost yet."""
        heappush(self._roomy, (0.0, len(self.room)))
        self.room.append(room)

    def cheapest(self, length: int) -> int | None:
        """The bin of the least cost, of those the first, with room for `length` tokens."""
        while self._full and -self._full[0][0] >= length:
            _, index, cost = heappop(self._full)
            heappush(self._roomy, (cost, index))
        while self._roomy and self.room[self._roomy[0][1]] < length:
            cost, index = heappop(self._roomy)
            heappush(self._full, (-self.room[index], index, cost))
        return self._roomy[0][1] if self._roomy else None

    def fill(self, room: int, cost: float) -> None:
        """Leave `room` in the bin that `cheapest` has just named, which costs so much more."""
        spent, index = self._roomy[0]
        self.room[index] = room
        heapreplace(self._roomy, (spent + cost, index))

    def most_room(self) -> int:
        """After `cheapest` has found none; -1 where there is no bin."""
        return -self._full[0][0] if self._full else -1


def _first_fit(lengths: Sequence[int], order: Sequence[int], budget: int) -> int:
    """Bins, where each sequence, in `order`, goes into the first with room, or a new one."""
    bins = _Bins()  # all of one cost: the cheapest is the first
    for index in order:
        length = lengths[index]
        first = bins.cheapest(length)
        if first is None:
            bins.add(budget - length)
        else:
            bins.fill(bins.room[first] - length, 0.0)
    return len(bins.room)


def _spread(
    lengths: Sequence[int],
    cost: Sequence[float],
    order: Sequence[int],
    budget: int,
    dp_size: int,
    num_bins: int,
) -> list[list[Bin]] | None:
    """`num_bins` bins for each rank; None where a sequence finds no room."""
    ranks: list[list[Bin]] = [[[] for _ in range(num_bins)] for _ in range(dp_size)]
    bins_of = [_Bins() for _ in ranks]
    longest = max(lengths, default=0)
    for bins in bins_of:
        for _ in range(num_bins):
            bins.add(longest)  # empty: any one goes in
    cheapest = [(0.0, rank) for rank in range(dp_size)]  # a heap of (cost, rank)
    full: list[
        tuple[int, int, float]
    ] = []  # a heap of (-room, rank, cost): without room for now
    for index in order:
        length = lengths[index]
        while full and -full[0][0] >= length:
            _, rank, spent = heappop(full)
            heappush(cheapest, (spent, rank))
        place = None
        while cheapest and place is None:
            spent, rank = cheapest[0]
            place = bins_of[rank].cheapest(length)
            if place is None:
                heappop(cheapest)
                heappush(full, (-bins_of[rank].most_room(), rank, spent))
        if place is None:
            return None
        bins = bins_of[rank]
        before = bins.room[place] if ranks[rank][place] else budget
        bins.fill(before - length, cost[index])
        ranks[rank][place].append(index)
        heapreplace(cheapest, (spent + cost[index], rank))
    return ranks


def describe_plan(
    lengths: Sequence[int],
    plan: Sequence[Sequence[Bin]],
    *,
    budget: int,
    quadratic_at: float,
) -> PackingReport:
    """Fill and balance of a plan for sequences of so many tokens."""
    bins = [indices for mine in plan for indices in mine]
    used = [sum(lengths[i] for i in indices) for indices in bins]
    cost = [sequence_cost(length, quadratic_at) for length in lengths]
    load = [sum(cost[i] for indices in mine for i in indices) for mine in plan]
    return PackingReport(
        num_tokens=sum(used),
        room=sum(max(budget, tokens) for tokens in used) if any(used) else 0,
        mean_cost=sum(load) / len(load),
        cost_spread=max(load) - min(load),
        num_bins=len(bins),
    )
