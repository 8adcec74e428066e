"""Which problems a step trains on: a function of (seed, step) alone, the same on every rank."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import floor


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSampler:
    """Several sources in turn, each by its weight and epoch after epoch in an order of its own.

    members: the problem indices of each source, at least one. Stateless: resuming needs the step
    number only. Among the first n draws of a run are n times a source's share of the weights, give
    or take fewer draws than there are sources, whatever the batch size. A batch continues into the
    next epoch where one ends, and repeats problems where there are fewer than `batch_size`.
    """

    members: tuple[Sequence[int], ...]
    weights: tuple[float, ...]
    batch_size: int
    seed: int

    def indices(self, step: int) -> list[int]:
        """The `batch_size` problem indices of a step, counted from 0, in order."""
        first = step * self.batch_size
        return [self._at(position) for position in range(first, first + self.batch_size)]

    def _at(self, position: int) -> int:
        """What is drawn at a position of the run, from 0.

        The first source takes those positions at which the whole part of position x share grows;
        of the others, counted anew, the second takes its own, and so on. Fractions, so that it is
        the same everywhere.
        """
        weights = [Fraction(str(weight)) for weight in self.weights]
        for number, members in enumerate(self.members):
            share = weights[number] / sum(weights[number:])
            before = floor(position * share)
            if floor((position + 1) * share) > before:
                name = f"{self.seed}:{number}" if len(self.members) > 1 else f"{self.seed}"
                epoch, offset = divmod(before, len(members))
                return members[_permutation(name, epoch, len(members))[offset]]
            position -= before
        raise AssertionError("the last source has the whole share")


@lru_cache(maxsize=32)
def _permutation(name: str, epoch: int, num_problems: int) -> tuple[int, ...]:
    order = list(range(num_problems))
    random.Random(f"epoch:{name}:{epoch}").shuffle(order)  # a generator of its own, seeded by text
    return tuple(order)
