"""Sequences into micro-batches: packed (THD) to a token budget, the same number on every rank.

Pure and deterministic: every rank computes the whole plan and builds its own part of it
(`microbatch.pack`).
"""

import heapq
from collections.abc import Sequence

Bin = list[int]

# Attention costs n^2 * d, everything else about 12 n * hidden: at this length the two are equal for
# common shapes. Only the balance between ranks depends on it.
_QUADRATIC_AT = 8192


def sequence_cost(num_tokens: int) -> float:
    """Relative compute of one sequence: linear part plus attention's square."""
    return num_tokens * (1.0 + num_tokens / _QUADRATIC_AT)


def pack_bins(lengths: Sequence[int], budget: int) -> list[Bin]:
    """First-fit-decreasing: indices of `lengths` in bins of at most `budget` tokens.

    A sequence longer than the budget gets a bin of its own.
    """
    bins: list[Bin] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for number, free in enumerate(room):
            if lengths[index] <= free:
                bins[number].append(index)
                room[number] -= lengths[index]
                break
        else:
            bins.append([index])
            room.append(budget - lengths[index])
    return bins


def _spread_bins(lengths: Sequence[int], num_bins: int, budget: int) -> list[Bin] | None:
    """Longest-first into the least loaded of `num_bins` bins; None when one would exceed the
    budget.
    """
    heap = [(0, number) for number in range(num_bins)]
    bins: list[Bin] = [[] for _ in range(num_bins)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, number = heapq.heappop(heap)
        if bins[number] and tokens + lengths[index] > budget:
            return None
        bins[number].append(index)
        heapq.heappush(heap, (tokens + lengths[index], number))
    return bins


def plan_packing(
    lengths: Sequence[int], *, budget: int, dp_size: int, multiple: int = 1
) -> list[list[Bin]]:
    """For each data-parallel rank its bins of indices into `lengths`; equally many for each rank.

    The number per rank is a multiple of `multiple` (interleaved 1F1B needs that of the pipeline
    size); a bin may be empty, which becomes a filler micro-batch. Ranks are balanced by
    `sequence_cost`.
    """
    bins = pack_bins(lengths, budget)
    per_rank = -(-len(bins) // dp_size)
    per_rank = -(-per_rank // multiple) * multiple
    bins = _spread_bins(lengths, per_rank * dp_size, budget) or bins
    cost = [sum(sequence_cost(lengths[i]) for i in indices) for indices in bins]
    ranks: list[list[Bin]] = [[] for _ in range(dp_size)]
    heap = [(0.0, rank) for rank in range(dp_size)]
    for number in sorted(range(len(bins)), key=lambda b: (-cost[b], b)):
        load, rank = heapq.heappop(heap)
        ranks[rank].append(bins[number])
        if len(ranks[rank]) < per_rank:
            heapq.heappush(heap, (load + cost[number], rank))
    for mine in ranks:
        mine.extend([] for _ in range(per_rank - len(mine)))
    return ranks
