"""Sequences into micro-batches: packed (THD) to a token budget, the same number on every rank.

Pure and deterministic: every rank computes the whole plan and builds its own part of it
(`microbatch.pack`). Three steps: the least number of bins, bins of equal cost, then exchanges
between the costliest and the cheapest rank (and bin of a rank).
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, combinations, islice, product

Bin = list[int]

_RANK_TOLERANCE = 0.005  # (max - min) / mean of the ranks' cost at which the search ends
_BIN_TOLERANCE = 0.05  # the same for the bins of a rank
_GOOD_IMBALANCE = 0.02  # of the ranks: then the bins spread by cost are taken, not the packed ones
# Bounds on the search; lower ones cost fill or balance, higher ones only time.
_MAX_CANDIDATES = 64  # sequences of which `_fill_bins` makes one bin full
_MAX_OFFERS = 40  # sets of at most two sequences which a bin offers in an exchange
_MAX_BINS_SEARCHED = 32  # of a rank; with more, exchanging whole bins is enough
_MAX_PLANNED = 1024  # sequences that are planned together; beyond, blocks of ranks apart
_MAX_PARTNERS = 16  # which the costliest (cheapest) rank or bin of a rank tries


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingReport:
    """How good a plan is."""

    fill: float  # tokens / room of all bins; a lone longer sequence has its own length as room
    imbalance: float  # (max - min) / mean of the ranks' cost
    num_bins: int  # over all ranks, fillers included


NOTHING_PACKED = PackingReport(fill=0.0, imbalance=0.0, num_bins=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Tokens and cost of each sequence, and the tokens which a bin may hold."""

    tokens: Sequence[int]
    cost: Sequence[float]
    budget: int

    def load(self, bins: Sequence[Bin]) -> float:
        return sum(self.cost[i] for indices in bins for i in indices)

    def room(self, indices: Bin) -> int:
        """Negative for a lone longer sequence: nothing is added to it or exchanged for it."""
        return self.budget - sum(self.tokens[i] for i in indices)

    def offers(self, indices: Bin) -> list[tuple[float, int, Bin]]:
        """(cost, tokens, indices) of what may leave the bin: nothing, one or two sequences."""
        sets = chain.from_iterable(combinations(indices, size) for size in range(3))
        return [
            (self.load([some]), self.budget - self.room(some), some)
            for some in map(list, islice(sets, _MAX_OFFERS))
        ]


def sequence_cost(num_tokens: int, quadratic_at: float) -> float:
    """Relative compute of one sequence: linear part plus attention's square.

    `quadratic_at`: the length in tokens at which attention costs as much as all the rest.
    """
    return num_tokens * (1.0 + num_tokens / quadratic_at)


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def _first_fit(lengths: Sequence[int], budget: int) -> list[Bin]:
    """First-fit-decreasing: at most 11/9 of the least number of bins, plus one."""
    bins: list[Bin] = []
    room: list[int] = []
    for index in _longest_first(lengths):
        for number, free in enumerate(room):
            if lengths[index] <= free:
                bins[number].append(index)
                room[number] -= lengths[index]
                break
        else:
            bins.append([index])
            room.append(budget - lengths[index])
    return bins


def _fill_bins(lengths: Sequence[int], budget: int) -> list[Bin]:
    """One bin after the other: the longest sequence left, then the set which fills the rest best.

    Bit s of a number in `sums` says whether the candidates so far have a subset of s tokens (subset
    sum). The candidates are evenly spread over the lengths, so the short ones last to the end.
    """
    bins: list[Bin] = []
    rest = _longest_first(lengths)
    while rest:
        first = rest.pop(0)
        room = max(0, budget - lengths[first])
        candidates = rest[:: max(1, len(rest) // _MAX_CANDIDATES)]
        sums = [1]
        for index in candidates:
            sums.append((sums[-1] | sums[-1] << lengths[index]) & ((2 << room) - 1))
        wanted = sums.pop().bit_length() - 1
        taken: set[int] = set()
        for index, without in zip(reversed(candidates), reversed(sums), strict=True):
            if not without >> wanted & 1:
                taken.add(index)
                wanted -= lengths[index]
        bins.append([first, *(i for i in candidates if i in taken)])
        rest = [i for i in rest if i not in taken]
    return bins


def pack_bins(lengths: Sequence[int], budget: int) -> list[Bin]:
    """Indices of `lengths` in few bins of at most `budget` tokens, never more than first-fit's.

    A sequence longer than the budget gets a bin of its own.
    """
    return min(_fill_bins(lengths, budget), _first_fit(lengths, budget), key=len)


def _spread(sizes: _Sizes, num_bins: int) -> list[Bin] | None:
    """Longest-first into the cheapest of `num_bins` bins with room; None when none has room."""
    bins: list[Bin] = [[] for _ in range(num_bins)]
    load = [0.0] * num_bins
    room = [sizes.budget] * num_bins
    for index in _longest_first(sizes.tokens):
        fits = [b for b in range(num_bins) if sizes.tokens[index] <= room[b] or not bins[b]]
        if not fits:
            return None
        number = min(fits, key=load.__getitem__)
        bins[number].append(index)
        load[number] += sizes.cost[index]
        room[number] -= sizes.tokens[index]
    return bins


def _deal(bins: list[Bin], dp_size: int, sizes: _Sizes) -> list[list[Bin]]:
    """Costliest bin first to the rank of the least cost which has not its share of bins yet."""
    ranks: list[list[Bin]] = [[] for _ in range(dp_size)]
    open_ranks = [(0.0, rank) for rank in range(dp_size)]  # a heap of (cost, rank)
    for indices in sorted(bins, key=lambda b: -sizes.load([b])):
        load, rank = heappop(open_ranks)
        ranks[rank].append(indices)
        if len(ranks[rank]) < len(bins) // dp_size:
            heappush(open_ranks, (load + sizes.load([indices]), rank))
    return ranks


def _exchange_bins(heavy: list[Bin], light: list[Bin], wanted: float, sizes: _Sizes) -> bool:
    """Exchange the two whole bins whose costs differ by nearly `wanted`, if there are such."""
    light_costs = sorted((sizes.load([indices]), b) for b, indices in enumerate(light))
    pairs = []
    for a, indices in enumerate(heavy):
        cost = sizes.load([indices])
        at = bisect_left(light_costs, (cost - wanted, 0))
        pairs += [(abs(cost - c - wanted), a, b) for c, b in light_costs[max(0, at - 1) : at + 1]]
    error, a, b = min(pairs)
    if error > 0.5 * wanted:
        return False
    heavy[a], light[b] = light[b], heavy[a]
    return True


def _exchange_sequences(heavy: list[Bin], light: list[Bin], wanted: float, sizes: _Sizes) -> bool:
    """Exchange up to two sequences of a bin for up to two of another, as far as both have room.

    The first two bins where what goes out and back can differ by nearly `wanted`, else the best.
    """
    error, found = 0.9 * wanted, None
    sides = (
        [(b, sizes.room(b), sizes.offers(b)) for b in bins[:_MAX_BINS_SEARCHED]]
        for bins in (heavy, light)
    )
    for (one, one_room, outs), (other, other_room, backs) in product(*sides):
        for out_cost, out_tokens, out in outs:
            least, most, goal = out_tokens - other_room, out_tokens + one_room, out_cost - wanted
            for back_cost, back_tokens, back in backs:
                if least <= back_tokens <= most and abs(back_cost - goal) < error:
                    error, found = abs(back_cost - goal), (one, other, out, back)
        if error < 0.25 * wanted:
            break
    if found is None:
        return False
    one, other, out, back = found
    one[:] = [i for i in one if i not in out] + back
    other[:] = [i for i in other if i not in back] + out
    return True


def _level(groups: list[list[Bin]], tolerance: float, sizes: _Sizes) -> None:
    """Exchange bins and sequences until the groups' costs differ by `tolerance` of their mean, or
    neither the costliest nor the cheapest group finds a partner.
    """
    load = [sizes.load(group) for group in groups]

    def narrow(heavy: int, light: int) -> bool:
        gap = load[heavy] - load[light]
        both = groups[heavy], groups[light]
        if gap <= tolerance * sum(load) / len(load) or not (
            _exchange_bins(*both, gap / 2, sizes) or _exchange_sequences(*both, gap / 2, sizes)
        ):
            return False
        load[heavy], load[light] = sizes.load(groups[heavy]), sizes.load(groups[light])
        return True

    for _ in range(8 * len(groups)):
        order = sorted(range(len(groups)), key=load.__getitem__)
        cheapest, costliest = order[0], order[-1]
        if not any(narrow(costliest, light) for light in order[:_MAX_PARTNERS]) and not any(
            narrow(heavy, cheapest) for heavy in order[: -_MAX_PARTNERS - 1 : -1]
        ):
            return


def _imbalance(groups: Sequence[Sequence[Bin]], sizes: _Sizes) -> float:
    load = [sizes.load(group) for group in groups]
    return (max(load) - min(load)) * len(load) / sum(load) if any(load) else 0.0


def plan_packing(
    lengths: Sequence[int],
    *,
    budget: int,
    dp_size: int,
    multiple: int = 1,
    quadratic_at: float = 8192.0,
) -> list[list[Bin]]:
    """For each data-parallel rank its bins of indices into `lengths`; equally many for each rank.

    The number per rank is a multiple of `multiple` (interleaved 1F1B needs that of the pipeline
    size); a bin may be empty, which becomes a filler micro-batch. Ranks, and the bins of a rank,
    are balanced by `sequence_cost`; each rank has its costliest bin first, so that expert-parallel
    ranks, which wait for each other in every micro-batch, work on alike ones. Of very many
    sequences blocks of ranks get equal parts, and each block is planned for itself.
    """
    num_blocks = _num_blocks(len(lengths), dp_size)
    # In turn, there and back, so that all blocks get as good as the same.
    dealt: list[list[int]] = [[] for _ in range(num_blocks)]
    for place, index in enumerate(_longest_first(lengths)):
        lap, column = divmod(place, num_blocks)
        dealt[column if lap % 2 == 0 else num_blocks - 1 - column].append(index)
    packed = [pack_bins([lengths[i] for i in block], budget) for block in dealt]
    block_ranks = dp_size // num_blocks
    rank_bins = -(-max(map(len, packed)) // (block_ranks * multiple)) * multiple
    ranks: list[list[Bin]] = []
    for block, bins in zip(dealt, packed, strict=True):
        tokens = [lengths[i] for i in block]
        cost = [sequence_cost(length, quadratic_at) for length in tokens]
        sizes = _Sizes(tokens=tokens, cost=cost, budget=budget)
        planned = _plan_ranks(sizes, bins, block_ranks, rank_bins)
        ranks += [[[block[i] for i in indices] for indices in mine] for mine in planned]
    return ranks


def _num_blocks(num_sequences: int, dp_size: int) -> int:
    """Groups of ranks whose parts are planned apart: the search takes more than linear time."""
    divisors = (d for d in range(1, dp_size + 1) if dp_size % d == 0)
    return next(d for d in divisors if num_sequences <= d * _MAX_PLANNED or d == dp_size)


def _plan_ranks(sizes: _Sizes, bins: list[Bin], dp_size: int, rank_bins: int) -> list[list[Bin]]:
    """So many bins for each of the ranks, of the sequences that `bins` hold."""
    num_bins = dp_size * rank_bins
    # Nearly full bins leave no room to spread over, or too little; then the packed ones do better.
    starts = [_spread(sizes, num_bins), bins + [[] for _ in range(num_bins - len(bins))]]
    plans = [_deal(start, dp_size, sizes) for start in starts if start is not None]
    for plan in plans:
        _level(plan, _RANK_TOLERANCE, sizes)
    ranks = min(plans, key=lambda plan: max(_GOOD_IMBALANCE, _imbalance(plan, sizes)))
    for mine in ranks:
        _level([[indices] for indices in mine], _BIN_TOLERANCE, sizes)
        mine.sort(key=lambda indices: -sizes.load([indices]))
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
        imbalance=_imbalance(plan, _Sizes(tokens=lengths, cost=cost, budget=budget)),
        num_bins=len(bins),
    )
