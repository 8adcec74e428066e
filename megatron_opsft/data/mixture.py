"""A mixture: several sources as one problem set, each drawn from by its weight."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import floor

from megatron_opsft.config import DataConfig
from megatron_opsft.data.problems import ProblemSet, load_problems
from megatron_opsft.errors import UserError


def load_training(data: DataConfig, *, with_fields: bool) -> ProblemSet:
    """The problems of `data.train`, one source or several. Errors: `UserError`."""
    sets = [
        load_problems(
            part.path,
            split=str(part.split),
            subset=part.subset,
            problem_field=part.problem_field,
            answer_field=part.answer_field,
            template=data.template,
            with_fields=with_fields,
        )
        for part in data.parts
    ]
    return sets[0] if len(sets) == 1 else _joined(sets)


def _joined(sets: Sequence[ProblemSet]) -> ProblemSet:
    """The sets in order, as one. An id that an earlier set has gets the number of its part."""
    problems = {}
    for number, part in enumerate(sets):
        for problem in part.problems:
            unique = problem.id
            while unique in problems:
                unique = f"{unique}@{number + 1}"
            problems[unique] = replace(problem, id=unique, part=number)
    return ProblemSet(
        name=" + ".join(part.name for part in sets),
        problems=tuple(problems.values()),
        bad_rows=tuple(bad for part in sets for bad in part.bad_rows),
        sources=tuple(part.name for part in sets),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSampler:
    """Which problems a step trains on: a function of (seed, step) alone, the same on every rank.

    Draws from several sources by weight; each source repeats epoch after epoch, in a new order.

    members: the problem indices of each source, at least one. Stateless: resuming needs the step
    number only. After n draws each source has had its share of n, to within fewer draws than there
    are sources, whatever the batch size. A batch goes on into the next epoch where one ends, so it
    repeats problems where there are fewer than `batch_size`.
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


def order_of(problems: ProblemSet, data: DataConfig, seed: int) -> ProblemSampler:
    """The sampler of a run. Errors: `UserError` for a source that has no problem left."""
    members: list[list[int]] = [[] for _ in problems.sources]
    for index, problem in enumerate(problems.problems):
        members[problem.part].append(index)
    for source, indices in zip(problems.sources, members, strict=True):
        if not indices:
            raise UserError(f"data.train: no problem of {source} is left; take it out of the list")
    return ProblemSampler(
        members=tuple(map(tuple, members)),
        weights=tuple(part.weight for part in data.parts),
        batch_size=data.prompts_per_step,
        seed=seed,
    )
