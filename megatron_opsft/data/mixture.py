"""A mixture: several sources as one problem set, each drawn from by its weight."""

from collections.abc import Sequence
from dataclasses import replace

from megatron_opsft.config import DataConfig
from megatron_opsft.data.problems import ProblemSet, load_problems
from megatron_opsft.data.sampler import ProblemSampler
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
    """One behind the other. An id that an earlier set has gets the number of its part."""
    problems = {}
    for number, part in enumerate(sets):
        for problem in part.problems:
            unique = problem.id
            while unique in problems:
                unique = f"{unique}@{number + 1}"
            problems[unique] = replace(problem, id=unique)
    return ProblemSet(
        name=" + ".join(part.name for part in sets),
        problems=tuple(problems.values()),
        rows=tuple(row for part in sets for row in part.rows),
        bad_rows=tuple(bad for part in sets for bad in part.bad_rows),
        sources=tuple(part.name for part in sets),
        parts=tuple(number for number, part in enumerate(sets) for _ in part.rows),
    )


def order_of(problems: ProblemSet, data: DataConfig, seed: int) -> ProblemSampler:
    """Which of `problems` each step has. Errors: `UserError` for a source of which nothing is
    left.
    """
    members: list[list[int]] = [[] for _ in problems.sources]
    for index, part in enumerate(problems.parts):
        members[part].append(index)
    for source, indices in zip(problems.sources, members, strict=True):
        if not indices:
            raise UserError(f"data.train: no problem of {source} is left; take it out of the list")
    return ProblemSampler(
        members=tuple(map(tuple, members)),
        weights=tuple(part.weight for part in data.parts),
        batch_size=data.prompts_per_step,
        seed=seed,
    )
