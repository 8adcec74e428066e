"""Sequences into micro-batches: packed (THD) to a token budget, the same number on every rank.

Pure and deterministic: every rank makes the whole plan and builds its own part of it
(`microbatch.pack`). First-fit says how few bins will do. The sequences then go, longest first, into
the cheapest of these that has room; where one finds no room, first-fit's bins are kept. The bins
are dealt to the ranks, and the costliest ranks exchange with the cheapest ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import chain, combinations, islice
from typing import Any, NamedTuple

import numpy as np

Bin = list[int]

# Bounds on the search for exchanges; lower ones cost balance, higher ones only time.
_MAX_PASSES = 32  # over all ranks, in each of which a rank exchanges with one other
_MAX_PASSES_IN_RANK = 2  # the same over a rank's bins
_MAX_IDLE = 4  # passes, one after the other, which find nothing to exchange
_MAX_OFFERS_OF_BIN, _MAX_OFFERS = 40, 256  # sets of at most two sequences, of a bin and of a rank


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
    first-fit needs, as a multiple of `multiple` (interleaved 1F1B needs that of the pipeline size);
    a bin may be empty, which becomes a micro-batch of padding. Ranks are balanced by
    `sequence_cost`; each has its costliest bin first, so that expert-parallel ranks, which wait for
    each other in every micro-batch, work on alike ones.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    cost = [sequence_cost(length, quadratic_at) for length in lengths]
    dense = first_fit(lengths, order, budget)
    num_bins = -(-len(dense) // (dp_size * multiple)) * multiple * dp_size
    bins = _spread(lengths, cost, order, budget, num_bins)
    if bins is None:
        bins = dense + [[] for _ in range(num_bins - len(dense))]
    ranks = _deal(bins, dp_size, cost)
    _exchange(ranks, lengths, cost, budget, tolerance=0.005, max_passes=_MAX_PASSES)
    for mine in ranks:
        alone = [[indices] for indices in mine]
        _exchange(alone, lengths, cost, budget, tolerance=0.05, max_passes=_MAX_PASSES_IN_RANK)
        mine.sort(key=lambda indices: -_cost_of([indices], cost))
    return ranks


def first_fit(lengths: Sequence[int], order: Sequence[int], budget: int) -> list[Bin]:
    """Each sequence, in `order`, into the first bin with room, or a new one."""
    bins: list[Bin] = []
    room = np.zeros(len(lengths), dtype=np.int64)
    for index in order:
        fits = room[: len(bins)] >= lengths[index]
        first = int(fits.argmax()) if bins else 0
        if bins and fits[first]:
            bins[first].append(index)
            room[first] -= lengths[index]
        else:
            room[len(bins)] = budget - lengths[index]
            bins.append([index])
    return bins


def _spread(
    lengths: Sequence[int],
    cost: Sequence[float],
    order: Sequence[int],
    budget: int,
    num_bins: int,
) -> list[Bin] | None:
    """Longest first into the cheapest of `num_bins` bins with room; None when none has room."""
    bins: list[Bin] = [[] for _ in range(num_bins)]
    load, room = [0.0] * num_bins, [max(lengths, default=0)] * num_bins  # empty: any one goes in
    cheapest = [(0.0, b) for b in range(num_bins)]  # a heap of (cost, bin)
    full: list[tuple[int, int]] = []  # a heap of (-room, bin): those without room at present
    for index in order:
        length = lengths[index]
        while full and -full[0][0] >= length:
            _, b = heappop(full)
            heappush(cheapest, (load[b], b))
        while cheapest and room[cheapest[0][1]] < length:
            _, b = heappop(cheapest)
            heappush(full, (-room[b], b))
        if not cheapest:
            return None
        _, b = cheapest[0]
        room[b] = (room[b] if bins[b] else budget) - length
        load[b] += cost[index]
        bins[b].append(index)
        heapreplace(cheapest, (load[b], b))
    return bins


def _deal(bins: Sequence[Bin], dp_size: int, cost: Sequence[float]) -> list[list[Bin]]:
    """Costliest bin first to the rank of the least cost which has not its share of bins yet."""
    ranks: list[list[Bin]] = [[] for _ in range(dp_size)]
    open_ranks = [(0.0, rank) for rank in range(dp_size)]  # a heap of (cost, rank)
    loads = [_cost_of([indices], cost) for indices in bins]
    for b in sorted(range(len(bins)), key=lambda b: -loads[b]):
        load, rank = heappop(open_ranks)
        ranks[rank].append(bins[b])
        if len(ranks[rank]) < len(bins) // dp_size:
            heappush(open_ranks, (load + loads[b], rank))
    return ranks


def _exchange(
    groups: list[list[Bin]],
    lengths: Sequence[int],
    cost: Sequence[float],
    budget: int,
    *,
    tolerance: float,
    max_passes: int,
) -> None:
    """Pass by pass, the cheapest group exchanges with the costliest, the next with the next; after
    a pass in which none finds anything, with the one after it.

    tolerance: difference of two groups' costs / mean cost that needs no exchange.
    """
    load = [_cost_of(bins, cost) for bins in groups]
    idle = 0
    for _ in range(max_passes):
        order = sorted(range(len(groups)), key=load.__getitem__)
        enough = tolerance * sum(load) / max(1, len(load))
        if idle > _MAX_IDLE or not order or load[order[-1]] - load[order[0]] <= enough:
            return
        num_exchanges = 0
        for light, heavy in zip(order[: len(order) // 2], order[::-1][idle:], strict=False):
            gap = load[heavy] - load[light]
            both = groups[heavy], groups[light]
            if gap > enough and (
                _exchange_bins(*both, gap / 2, cost)
                or _exchange_sequences(*both, gap / 2, lengths, cost, budget)
            ):
                num_exchanges += 1
                load[heavy], load[light] = (_cost_of(bins, cost) for bins in both)
        idle = 0 if num_exchanges else idle + 1


def _exchange_bins(
    heavy: list[Bin], light: list[Bin], wanted: float, cost: Sequence[float]
) -> bool:
    """The two bins whose costs differ by nearly `wanted`, if there are such."""
    heavy_cost, light_cost = ([_cost_of([b], cost) for b in bins] for bins in (heavy, light))
    missed = abs(np.array(heavy_cost)[:, None] - light_cost - wanted)
    a, b = divmod(int(missed.argmin()), len(light))
    if missed[a, b] > 0.25 * wanted:
        return False
    heavy[a], light[b] = light[b], heavy[a]
    return True


class _Offers(NamedTuple):
    """What may leave a rank: sets of at most two sequences of a bin."""

    sets: list[tuple[Bin, tuple[int, ...]]]
    tokens: Any  # int64 [offers]
    cost: Any  # float64 [offers]
    room: Any  # int64 [offers], of the bin


def _offers(
    bins: Sequence[Bin], lengths: Sequence[int], cost: Sequence[float], budget: int
) -> _Offers:
    sets: list[tuple[Bin, tuple[int, ...]]] = []
    room: list[int] = []
    for indices in bins:
        some = chain.from_iterable(combinations(indices, size) for size in range(3))
        found = list(islice(some, _MAX_OFFERS_OF_BIN))
        sets += [(indices, chosen) for chosen in found]
        room += [budget - sum(lengths[i] for i in indices)] * len(found)
        if len(sets) >= _MAX_OFFERS:
            break
    return _Offers(
        sets=sets,
        tokens=np.array([sum([lengths[i] for i in chosen]) for _, chosen in sets]),
        cost=np.array([sum([cost[i] for i in chosen]) for _, chosen in sets]),
        room=np.array(room),
    )


def _exchange_sequences(
    heavy: list[Bin],
    light: list[Bin],
    wanted: float,
    lengths: Sequence[int],
    cost: Sequence[float],
    budget: int,
) -> bool:
    """Up to two sequences of a bin for up to two of another: those whose costs differ by nearly
    `wanted`, as far as both bins have room. False where there are none.
    """
    outs, backs = (_offers(bins, lengths, cost, budget) for bins in (heavy, light))
    missed = abs(outs.cost[:, None] - backs.cost - wanted)  # [outs, backs]
    grown = outs.tokens[:, None] - backs.tokens  # of the light rank's bin
    missed[(grown > backs.room) | (-grown > outs.room[:, None])] = np.inf
    out, back = divmod(int(missed.argmin()), len(backs.sets))
    if missed[out, back] > 0.9 * wanted:
        return False
    (one, going), (other, coming) = outs.sets[out], backs.sets[back]
    one[:] = [i for i in one if i not in going] + list(coming)
    other[:] = [i for i in other if i not in coming] + list(going)
    return True


def _cost_of(bins: Sequence[Bin], cost: Sequence[float]) -> float:
    return sum([cost[i] for indices in bins for i in indices])


def describe_plan(
    lengths: Sequence[int], plan: Sequence[Sequence[Bin]], *, budget: int, quadratic_at: float
) -> PackingReport:
    """Fill and balance of a plan for `lengths`; both 0 when there is no sequence."""
    bins = [indices for mine in plan for indices in mine]
    used = [sum(lengths[i] for i in indices) for indices in bins]
    cost = [sequence_cost(length, quadratic_at) for length in lengths]
    load = [_cost_of(mine, cost) for mine in plan]
    room = sum(max(budget, tokens) for tokens in used)
    return PackingReport(
        fill=sum(used) / room if room else 0.0,
        imbalance=(max(load) - min(load)) * len(load) / sum(load) if any(load) else 0.0,
        num_bins=len(bins),
    )
