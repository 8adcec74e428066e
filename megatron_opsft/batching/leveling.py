"""Balance: exchanges of bins and of sequences between groups of bins; pure and deterministic."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, chain, combinations, islice
from typing import Any, NamedTuple

import numpy as np

from megatron_opsft.batching.bins import Bin

# Bounds on the search; lower ones cost balance, higher ones only time.
_MAX_OFFERS = 40  # sets of at most two sequences which a bin offers in an exchange
_MAX_BINS_SEARCHED = 32  # of a group; with more, exchanging whole bins is enough
_MAX_EXCHANGES = 8  # for each group


class Offers(NamedTuple):
    """What may leave a bin, in a fixed order: nothing, one sequence or two."""

    cost: Any  # float64 [offers]
    tokens: Any  # int64 [offers]
    most: Any  # int64 [offers], tokens which the bin has room for without them


class Sizes:
    """Tokens and cost of each sequence, and the tokens which a bin may hold.

    What it says of a bin is computed once.
    """

    def __init__(self, tokens: Sequence[int], cost: Sequence[float], budget: int) -> None:
        self.tokens = tokens
        self.cost = cost
        self.budget = budget
        self._offers: dict[tuple[int, ...], Offers] = {}

    def load(self, bins: Sequence[Bin]) -> float:
        """Cost of all sequences in the bins."""
        return sum([self.cost[i] for indices in bins for i in indices])

    def offers(self, indices: Bin) -> Offers:
        """A lone longer sequence has less room than it takes: nothing is exchanged for it."""
        key = tuple(indices)
        if key not in self._offers:
            one, other = _offered_places(len(indices))
            cost = np.array([*[self.cost[i] for i in indices], 0.0])
            tokens = np.array([*[self.tokens[i] for i in indices], 0], dtype=np.int64)
            some = tokens[one] + tokens[other]
            self._offers[key] = Offers(
                cost[one] + cost[other], some, some + (self.budget - tokens.sum())
            )
        return self._offers[key]


@cache
def _offered_places(size: int) -> tuple[Any, Any]:
    """Of each offer of a bin of so many sequences two places in it; `size` stands for none."""
    sets = chain.from_iterable(combinations(range(size), number) for number in range(3))
    places = [(*some, size, size)[:2] for some in islice(sets, _MAX_OFFERS)]
    one, other = np.array(places).T
    return one, other


def _offered(indices: Bin, offer: int) -> Bin:
    """The sequences of an offer of a bin."""
    places = [int(both[offer]) for both in _offered_places(len(indices))]
    return [indices[place] for place in places if place < len(indices)]


def level(groups: list[list[Bin]], tolerance: float, sizes: Sizes, max_partners: int) -> None:
    """Exchange bins and sequences until the groups' costs differ by `tolerance` of their mean, or
    neither the costliest nor the cheapest group finds a partner among so many.
    """
    load = [sizes.load(group) for group in groups]

    def narrow(heavy: int, light: int) -> bool:
        gap = load[heavy] - load[light]
        both = groups[heavy], groups[light]
        # One sequence alone is the costliest wherever it goes.
        if (
            gap <= enough
            or sum(map(len, groups[heavy])) == 1
            or not (
                _exchange_bins(*both, gap / 2, sizes) or _exchange_sequences(*both, gap / 2, sizes)
            )
        ):
            return False
        load[heavy], load[light] = sizes.load(groups[heavy]), sizes.load(groups[light])
        return True

    for _ in range(_MAX_EXCHANGES * len(groups)):
        enough = tolerance * sum(load) / len(load)
        order = sorted(range(len(groups)), key=load.__getitem__)
        cheapest, costliest = order[0], order[-1]
        if not any(narrow(costliest, light) for light in order[:max_partners]) and not any(
            narrow(heavy, cheapest) for heavy in order[: -max_partners - 1 : -1]
        ):
            return


def _exchange_bins(heavy: list[Bin], light: list[Bin], wanted: float, sizes: Sizes) -> bool:
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


def _exchange_sequences(heavy: list[Bin], light: list[Bin], wanted: float, sizes: Sizes) -> bool:
    """Exchange up to two sequences of a bin for up to two of another, as far as both have room.

    The first two bins where what goes out and back can differ by nearly `wanted`, else the best.
    One bin's offers are compared with those of all the others at once.
    """
    error, found = 0.9 * wanted, None
    others = light[:_MAX_BINS_SEARCHED]
    offers = [sizes.offers(indices) for indices in others]
    first = [0, *accumulate(len(offer.cost) for offer in offers)]
    backs = Offers(*map(np.concatenate, zip(*offers, strict=True)))
    for one in heavy[:_MAX_BINS_SEARCHED]:
        outs = sizes.offers(one)
        missed = abs(backs.cost - (outs.cost - wanted)[:, None])  # [offers, offers back]
        missed[outs.tokens[:, None] > backs.most] = np.inf
        missed[backs.tokens > outs.most[:, None]] = np.inf
        best = np.minimum.reduceat(missed.min(axis=0), first[:-1])  # of each other bin
        near = (best < 0.25 * wanted).nonzero()[0]
        b = int(best[: near[0] + 1 if len(near) else None].argmin())
        if best[b] < error:
            error = best[b]
            offered = missed[:, first[b] : first[b + 1]]
            out, back = divmod(int(offered.argmin()), offered.shape[1])
            found = one, others[b], out, back
        if len(near):
            break
    if found is None:
        return False
    one, other, out, back = found
    going, coming = _offered(one, out), _offered(other, back)
    one[:] = [i for i in one if i not in going] + coming
    other[:] = [i for i in other if i not in coming] + going
    return True
