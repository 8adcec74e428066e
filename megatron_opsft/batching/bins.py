"""Sequences into few bins of a token budget; pure and deterministic."""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

Bin = list[int]

_MAX_CANDIDATES = 64  # sequences of which `_fill_bins` makes one bin full; fewer cost fill


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Indices of `lengths`; equal ones in their order."""
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def pack_bins(lengths: Sequence[int], budget: int) -> list[Bin]:
    """Indices of `lengths` in few bins of at most `budget` tokens, never more than first-fit's.

    A sequence longer than the budget gets a bin of its own.
    """
    filled = _fill_bins(lengths, budget)
    if len(filled) <= _least_bins(lengths, budget):
        return filled
    return min(filled, _first_fit(lengths, budget), key=len)


def _least_bins(lengths: Sequence[int], budget: int) -> int:
    """Fewer do not have the room."""
    shorter = [length for length in lengths if length < budget]
    return len(lengths) - len(shorter) + -(-sum(shorter) // budget)


def _first_fit(lengths: Sequence[int], budget: int) -> list[Bin]:
    """First-fit-decreasing: at most 11/9 of the least number of bins, plus one."""
    bins: list[Bin] = []
    room = np.zeros(len(lengths), dtype=np.int64)
    for index in longest_first(lengths):
        length = lengths[index]
        fits = room[: len(bins)] >= length
        number = int(fits.argmax()) if bins else 0
        if bins and fits[number]:
            bins[number].append(index)
            room[number] -= length
        else:
            room[len(bins)] = budget - length
            bins.append([index])
    return bins


def _fill_bins(lengths: Sequence[int], budget: int) -> list[Bin]:
    """One bin after the other: the longest sequence left, then the set which fills the rest best.

    Bit s of a number in `sums` says whether the candidates so far have a subset of s tokens (subset
    sum). The candidates are evenly spread over the lengths, so the short ones last to the end.
    """
    bins: list[Bin] = []
    rest = longest_first(lengths)
    while rest:
        first = rest.pop(0)
        room = max(0, budget - lengths[first])
        mask = (2 << room) - 1
        places = range(0, len(rest), max(1, len(rest) // _MAX_CANDIDATES))
        places = places[bisect_left(places, -room, key=lambda place: -lengths[rest[place]]) :]
        sums, candidates = [1], []
        useless = -1  # a length which adds no sum
        for place in places:
            length = lengths[rest[place]]
            if length == useless:
                continue
            grown = (sums[-1] | sums[-1] << length) & mask
            if grown == sums[-1]:
                useless = length
                continue
            candidates.append(place)
            sums.append(grown)
            if grown >> room:
                break  # full
        wanted = sums.pop().bit_length() - 1
        taken: list[int] = []
        for place, without in zip(reversed(candidates), reversed(sums), strict=True):
            if not without >> wanted & 1:
                wanted -= lengths[rest[place]]
                taken.append(rest.pop(place))
        bins.append([first, *reversed(taken)])
    return bins
