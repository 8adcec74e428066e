"""A mixture: several sources as one problem set, each drawn from by its weight."""

from collections.abc import Sequence
from dataclasses import replace

from megatron_opsft.config import DataConfig
from megatron_opsft.data.problems import ProblemSet, load_problems, make_set
from megatron_opsft.data.sampler import MixtureSampler, ProblemSampler
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
    return sets[0] if isinstance(data.train, str) else _joined(sets)


def _joined(sets: Sequence[ProblemSet]) -> ProblemSet:
    """One behind the other. An id that an earlier set has gets the number of its part."""
    problems, rows, parts = [], [], []
    taken: set[str] = set()
    for number, part in enumerate(sets):
        for problem, row in zip(part.problems, part.rows, strict=True):
            unique = problem.id
            while unique in taken:
                unique = f"{unique}@{number + 1}"
            taken.add(unique)
            problems.append(replace(problem, id=unique))
            rows.append(row)
            parts.append(number)
    return make_set(
        " + ".join(part.name for part in sets),
        problems,
        rows,
        [bad for part in sets for bad in part.bad_rows],
        sources=tuple(part.name for part in sets),
        parts=tuple(parts),
    )


def order_of(problems: ProblemSet, data: DataConfig, seed: int) -> ProblemSampler | MixtureSampler:
    """Which of `problems` each step has. Errors: `UserError` for a part of which nothing is
    left.
    """
    if not problems.parts:
        return ProblemSampler(
            num_problems=len(problems.problems), batch_size=data.prompts_per_step, seed=seed
        )
    members: list[list[int]] = [[] for _ in problems.sources]
    for index, part in enumerate(problems.parts):
        members[part].append(index)
    for source, indices in zip(problems.sources, members, strict=True):
        if not indices:
            raise UserError(f"data.train: no problem of {source} is left; take it out of the list")
    return MixtureSampler(
        members=tuple(map(tuple, members)),
        weights=tuple(part.weight for part in data.parts),
        batch_size=data.prompts_per_step,
        seed=seed,
    )
