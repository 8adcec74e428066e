"""LASER-D's target lengths by difficulty, from responses to monitor problems."""

from collections.abc import Iterable, Sequence
from typing import Literal

from megatron_opsft.methods.facts import Group

Band = Literal["easy", "medium", "hard"]
Targets = dict[Band, int | None]


def band_of(group: Group) -> Band:
    """Easy from two thirds correct on, medium from one third on."""
    thirds = 3 * group.num_correct
    if thirds >= 2 * len(group.responses):
        return "easy"
    return "medium" if thirds >= len(group.responses) else "hard"


def fewest_correct(num_samples: int, rounding: Literal["ceil", "floor"]) -> dict[Band, int]:
    """Fewest correct responses of `num_samples` at each difficulty: of 8 they are 6, 3 and 1."""
    up = 2 if rounding == "ceil" else 0
    return {
        "easy": max((2 * num_samples + up) // 3, 1),
        "medium": max((num_samples + up) // 3, 1),
        "hard": 1,
    }


def choose_targets(
    groups: Sequence[Group], candidates: Iterable[int], rounding: Literal["ceil", "floor"]
) -> Targets:
    """For each difficulty the smallest candidate that keeps at least one correct response a
    problem: the share of its responses, right or wrong, that are no longer than the candidate,
    times the correct ones that the difficulty stands for, is at least 1. None where none does.
    """
    needed = fewest_correct(len(groups[0].responses), rounding)
    lengths: dict[Band, list[int]] = {band: [] for band in needed}
    for group in groups:
        lengths[band_of(group)] += group.lengths
    ascending = sorted(candidates)

    def covers(band: Band, candidate: int) -> bool:
        found = lengths[band]
        within = sum(length <= candidate for length in found)
        return bool(found) and within * needed[band] >= len(found)

    return {
        band: next((length for length in ascending if covers(band, length)), None)
        for band in needed
    }
