"""Sequences into micro-batches: packed (THD) to a token budget, the same number on every rank.

Deterministic: every rank has the whole plan and builds its own part of it (`microbatch.pack`).
Three steps: the least number of bins, bins of equal cost, then exchanges between the costliest and
the cheapest rank (and bin of a rank).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np

from megatron_opsft.batching.bins import Bin, longest_first, pack_bins
from megatron_opsft.batching.leveling import Sizes, level

Share = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]
"""(work, items) -> its results for all items, in order."""

_RANK_TOLERANCE = 0.005  # (max - min) / mean of the ranks' cost at which the search ends
_BIN_TOLERANCE = 0.05  # the same for the bins of a rank
_GOOD_IMBALANCE = 0.02  # of the ranks: then the bins spread by cost are taken, not the packed ones
# What is planned together; beyond, blocks of ranks apart: the search takes more than linear time.
_MAX_PLANNED = 1024  # sequences
_MAX_RANKS = 64
_MIN_RANKS = 8  # smaller blocks are worse to balance
# Which the costliest (cheapest) rank or bin of a rank tries.
_MAX_PARTNERS = 16
_FEW_PARTNERS = 4  # bins of a rank, where there are many parts to plan
_FEW_PARTS = 16  # up to which ranks have as many partners as where all is planned together


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingReport:
    """How good a plan is."""

    fill: float  # tokens / room of all bins; a lone longer sequence has its own length as room
    imbalance: float  # (max - min) / mean of the ranks' cost
    num_bins: int  # over all ranks, empty ones included


NOTHING_PACKED = PackingReport(fill=0.0, imbalance=0.0, num_bins=0)


def sequence_cost(num_tokens: int, quadratic_at: float) -> float:
    """Relative compute of one sequence: linear part plus attention's square.

    `quadratic_at`: the length in tokens at which attention costs as much as all the rest.
    """
    return num_tokens * (1.0 + num_tokens / quadratic_at)


def _spread(sizes: Sizes, num_bins: int) -> list[Bin] | None:
    """Longest-first into the cheapest of `num_bins` bins with room; None when none has room."""
    bins: list[Bin] = [[] for _ in range(num_bins)]
    load = np.zeros(num_bins)
    room = np.full(num_bins, np.iinfo(np.int64).max)  # an empty bin takes any sequence
    for index in longest_first(sizes.tokens):
        length = sizes.tokens[index]
        number = int(np.where(room >= length, load, np.inf).argmin())
        if room[number] < length:
            return None
        room[number] = (room[number] if bins[number] else sizes.budget) - length
        bins[number].append(index)
        load[number] += sizes.cost[index]
    return bins


def _deal(bins: list[Bin], dp_size: int, sizes: Sizes) -> list[list[Bin]]:
    """Costliest bin first to the rank of the least cost which has not its share of bins yet."""
    ranks: list[list[Bin]] = [[] for _ in range(dp_size)]
    open_ranks = [(0.0, rank) for rank in range(dp_size)]  # a heap of (cost, rank)
    for indices in sorted(bins, key=lambda b: -sizes.load([b])):
        load, rank = heappop(open_ranks)
        ranks[rank].append(indices)
        if len(ranks[rank]) < len(bins) // dp_size:
            heappush(open_ranks, (load + sizes.load([indices]), rank))
    return ranks


def _imbalance(groups: Sequence[Sequence[Bin]], sizes: Sizes) -> float:
    load = [sizes.load(group) for group in groups]
    return (max(load) - min(load)) * len(load) / sum(load) if any(load) else 0.0


def each_in_turn(work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """All work is done here."""
    return [work(item) for item in items]


def plan_packing(
    lengths: Sequence[int],
    *,
    budget: int,
    dp_size: int,
    multiple: int = 1,
    quadratic_at: float = 8192.0,
    share: Share = each_in_turn,
) -> list[list[Bin]]:
    """For each data-parallel rank its bins of indices into `lengths`; equally many for each rank.

    The number per rank is a multiple of `multiple` (interleaved 1F1B needs that of the pipeline
    size); a bin may be empty, which becomes a micro-batch of padding. Ranks, and the bins of a
    rank, are balanced by `sequence_cost`; each rank has its costliest bin first, so that
    expert-parallel ranks, which wait for each other in every micro-batch, work on alike ones. Of
    very many sequences or ranks, blocks of ranks get equal parts, and each part is planned for
    itself; a block of one rank may have several parts. share: who plans the parts, where
    all ranks call it with the same.
    """
    if len(lengths) <= dp_size and dp_size > _MAX_RANKS:
        return _one_each(lengths, dp_size, multiple)
    num_blocks = _num_blocks(len(lengths), dp_size)
    block_ranks = dp_size // num_blocks
    block_parts = max(1, -(-len(lengths) // (num_blocks * _MAX_PLANNED)))
    parts = _split(lengths, num_blocks * block_parts)
    packed = share(lambda part: pack_bins([lengths[i] for i in part], budget), parts)
    needed = [-(-len(bins) // block_ranks) for bins in packed]
    rank_bins = max(sum(needed[block::num_blocks]) for block in range(num_blocks))
    rank_bins = -(-rank_bins // multiple) * multiple
    bin_partners = _MAX_PARTNERS if len(parts) == 1 else _FEW_PARTNERS
    rank_partners = _MAX_PARTNERS if len(parts) <= _FEW_PARTS else _FEW_PARTNERS

    def plan(number: int) -> list[list[Bin]]:
        tokens = [lengths[i] for i in parts[number]]
        cost = [sequence_cost(length, quadratic_at) for length in tokens]
        sizes = Sizes(tokens, cost, budget)
        part_bins = rank_bins if block_parts == 1 else needed[number]
        return _plan_ranks(
            sizes, packed[number], block_ranks, part_bins, rank_partners, bin_partners
        )

    ranks: list[list[Bin]] = [[] for _ in range(dp_size)]
    for number, planned in enumerate(share(plan, range(len(parts)))):
        part = parts[number]
        for rank, mine in enumerate(planned, start=number % num_blocks * block_ranks):
            ranks[rank] += [[part[i] for i in indices] for indices in mine]
    cost = [sequence_cost(length, quadratic_at) for length in lengths]
    for mine in ranks:
        mine += [[] for _ in range(rank_bins - len(mine))]
        mine.sort(key=lambda indices: -sum(cost[i] for i in indices))
    return ranks


def _one_each(lengths: Sequence[int], dp_size: int, multiple: int) -> list[list[Bin]]:
    """At most one sequence for each rank, the longest first: nothing is more balanced."""
    num_bins = multiple if lengths else 0
    ranks: list[list[Bin]] = [[[] for _ in range(num_bins)] for _ in range(dp_size)]
    for mine, index in zip(ranks, longest_first(lengths), strict=False):
        mine[0].append(index)
    return ranks


def _num_blocks(num_sequences: int, dp_size: int) -> int:
    """Equal blocks of ranks whose sequences are planned apart."""
    divisors = [d for d in range(1, dp_size + 1) if dp_size % d == 0]
    enough = [d for d in divisors if num_sequences <= d * _MAX_PLANNED] or [dp_size]
    good = [d for d in enough if _MIN_RANKS <= dp_size // d <= _MAX_RANKS]
    return (good or enough)[0]


def _split(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Indices dealt longest first, in turn, there and back: all parts get nearly the same."""
    num_laps = -(-len(lengths) // num_parts)
    places = np.full(num_laps * num_parts, -1)
    places[: len(lengths)] = np.argsort(-np.array(lengths, dtype=np.int64), kind="stable")
    laps = places.reshape(num_laps, num_parts)
    laps[1::2] = laps[1::2, ::-1].copy()
    return [[i for i in part if i >= 0] for part in laps.T.tolist()]


def _plan_ranks(
    sizes: Sizes,
    bins: list[Bin],
    dp_size: int,
    rank_bins: int,
    rank_partners: int,
    bin_partners: int,
) -> list[list[Bin]]:
    """So many bins for each of the ranks, of the sequences that `bins` hold."""
    num_bins = dp_size * rank_bins
    ranks: list[list[Bin]] | None = None
    if (spread := _spread(sizes, num_bins)) is not None:
        ranks = _deal(spread, dp_size, sizes)
        level(ranks, _RANK_TOLERANCE, sizes, rank_partners)
    if ranks is None or _imbalance(ranks, sizes) > _GOOD_IMBALANCE:
        # Nearly full bins leave no room to spread over, or too little: the packed ones do better.
        dense = _deal(bins + [[] for _ in range(num_bins - len(bins))], dp_size, sizes)
        level(dense, _RANK_TOLERANCE, sizes, rank_partners)
        if ranks is None or _imbalance(dense, sizes) < _imbalance(ranks, sizes):
            ranks = dense
    for mine in ranks:
        level([[indices] for indices in mine], _BIN_TOLERANCE, sizes, bin_partners)
    return ranks


def describe_plan(
    lengths: Sequence[int], plan: Sequence[Sequence[Bin]], *, budget: int, quadratic_at: float
) -> PackingReport:
    """Fill and balance of a plan for `lengths`; both 0 when there is no sequence."""
    bins = [indices for mine in plan for indices in mine]
    room = sum(max(budget, sum(lengths[i] for i in indices)) for indices in bins)
    used = sum(lengths[i] for indices in bins for i in indices)
    cost = [sequence_cost(length, quadratic_at) for length in lengths]
    return PackingReport(
        fill=used / room if room else 0.0,
        imbalance=_imbalance(plan, Sizes(lengths, cost, budget)),
        num_bins=len(bins),
    )
