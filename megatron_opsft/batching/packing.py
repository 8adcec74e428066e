"""Sequences into micro-batches: packed (THD) to a token budget, the same number on every rank.

Pure and deterministic: every rank makes the whole plan and builds its own part of it
(`microbatch.pack`). First-fit says how few bins will do. The sequences then go, longest first, to
the rank of the least cost that has room, and there into the cheapest bin with room.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import count

import numpy as np

Bin = list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingReport:
    """How good a plan is; all 0 where nothing is packed."""

    fill: float = 0.0  # tokens / room of all bins; a lone longer sequence has its length as room
    imbalance: float = 0.0  # (max - min) / mean of the ranks' cost
    num_bins: int = 0  # over all ranks, empty ones included


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
    ranks = next(filter(None, (_spread(lengths, cost, order, budget, dp_size, n) for n in sizes)))
    for bins in ranks:
        bins.sort(key=lambda indices: -sum(cost[i] for i in indices))
    return ranks


def _first_fit(lengths: Sequence[int], order: Sequence[int], budget: int) -> int:
    """Bins, where each sequence, in `order`, goes into the first with room, or a new one."""
    num_bins = 0
    room = np.zeros(len(lengths), dtype=np.int64)
    for index in order:
        fits = room[:num_bins] >= lengths[index]
        first = int(fits.argmax()) if num_bins else 0
        if num_bins and fits[first]:
            room[first] -= lengths[index]
        else:
            room[num_bins] = budget - lengths[index]
            num_bins += 1
    return num_bins


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
    load = [[0.0] * num_bins for _ in ranks]
    room = [[max(lengths, default=0)] * num_bins for _ in ranks]  # empty: any one goes in
    cheapest = [(0.0, rank) for rank in range(dp_size)]  # a heap of (cost, rank)
    full: list[tuple[int, int, float]] = []  # a heap of (-room, rank, cost): without room for now
    for index in order:
        length = lengths[index]
        while full and -full[0][0] >= length:
            _, rank, spent = heappop(full)
            heappush(cheapest, (spent, rank))
        while cheapest and max(room[cheapest[0][1]], default=-1) < length:
            spent, rank = heappop(cheapest)
            heappush(full, (-max(room[rank], default=-1), rank, spent))
        if not cheapest:
            return None
        spent, rank = cheapest[0]
        _, b = min((load[rank][b], b) for b in range(num_bins) if room[rank][b] >= length)
        room[rank][b] = (room[rank][b] if ranks[rank][b] else budget) - length
        load[rank][b] += cost[index]
        ranks[rank][b].append(index)
        heapreplace(cheapest, (spent + cost[index], rank))
    return ranks


def describe_plan(
    lengths: Sequence[int], plan: Sequence[Sequence[Bin]], *, budget: int, quadratic_at: float
) -> PackingReport:
    """Fill and balance of a plan for `lengths`; both 0 when there is no sequence."""
    bins = [indices for mine in plan for indices in mine]
    used = [sum(lengths[i] for i in indices) for indices in bins]
    cost = [sequence_cost(length, quadratic_at) for length in lengths]
    load = [sum(cost[i] for indices in mine for i in indices) for mine in plan]
    room = sum(max(budget, tokens) for tokens in used)
    return PackingReport(
        fill=sum(used) / room if room else 0.0,
        imbalance=(max(load) - min(load)) * len(load) / sum(load) if any(load) else 0.0,
        num_bins=len(bins),
    )
