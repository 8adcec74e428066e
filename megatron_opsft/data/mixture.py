"""What a run trains on: one source or several as one problem set, without what cannot be used or
is held out; which problems a step draws, each source by its weight; and what a user should know.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import floor

from megatron_opsft.config import Config, DataConfig
from megatron_opsft.data.problems import BadRow, ProblemSet, fields_of, load_problems
from megatron_opsft.errors import PromptError, UserError
from megatron_opsft.records import Problem


def load_training(data: DataConfig, *, with_fields: bool) -> ProblemSet:
    """The problems of `data.train`, one source or several. Errors: `UserError`."""
    sets = [
        load_problems(
            part.path,
            split=str(part.split),
            **fields_of(part),
            template=data.template,
            with_fields=with_fields,
        )
        for part in data.sources
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
            problems[unique] = replace(problem, id=unique, source_index=number)
    return ProblemSet(
        name=" + ".join(part.name for part in sets),
        problems=tuple(problems.values()),
        bad_rows=tuple(bad for part in sets for bad in part.bad_rows),
        sources=tuple(part.name for part in sets),
    )


def drop_unusable_prompts(
    problem_set: ProblemSet,
    encode: Callable[[Problem], Sequence[int]],
    max_prompt_tokens: int,
) -> ProblemSet:
    """Leave out the problems whose encoded prompt is longer than the limit, and those that `encode`
    refuses: they become bad rows. Errors: `UserError` where nothing is left.
    """
    kept, bad_rows = [], [*problem_set.bad_rows]
    for problem in problem_set.problems:
        try:
            if (num_tokens := len(encode(problem))) > max_prompt_tokens:
                raise PromptError(
                    f"prompt of {num_tokens} tokens, more than data.max_prompt_tokens="
                    f"{max_prompt_tokens}"
                )
            kept.append(problem)
        except PromptError as error:
            source = problem_set.sources[problem.source_index]
            bad_rows.append(BadRow(source=source, row=problem.row, reason=str(error)))
    return replace(
        problem_set, problems=tuple(kept), bad_rows=tuple(bad_rows)
    ).checked()


def asked(problem: Problem) -> tuple[str, ...]:
    """What a problem asks, the same for two that differ in white space alone: each message."""
    told = [*(message.content for message in problem.before), problem.text]
    return tuple(" ".join(text.split()) for text in told)


def leave_out_held_out(
    training: ProblemSet, held_out: Mapping[str, ProblemSet]
) -> ProblemSet:
    """The training problems that no evaluation asks; the others become bad rows.

    held_out: the sets by what they are called in messages. Errors: `UserError` where nothing is
    left.
    """
    evaluated = {
        asked(problem): name
        for name, given in held_out.items()
        for problem in given.problems
    }
    kept, bad_rows = [], [*training.bad_rows]
    for problem in training.problems:
        if (name := evaluated.get(asked(problem))) is None:
            kept.append(problem)
        else:
            source = training.sources[problem.source_index]
            reason = f"also in {name}: what is evaluated is not trained on"
            bad_rows.append(BadRow(source=source, row=problem.row, reason=reason))
    if not kept:
        raise UserError(
            f"data.train={training.name}: all of its {len(training.problems)} problems are also in "
            f"{' or '.join(held_out)}, and what is evaluated is not trained on; train on others, "
            "or set eval.holdout=N instead, which takes N problems out of training"
        )
    return replace(training, problems=tuple(kept), bad_rows=tuple(bad_rows))


def take_held_out(
    problem_set: ProblemSet, num: int, seed: int
) -> tuple[ProblemSet, ProblemSet]:
    """(what is left to train on, `num` problems drawn with `seed`); all rows that ask the same are
    on one side. Errors: `UserError` where nothing would be left.
    """
    texts = list(dict.fromkeys(asked(problem) for problem in problem_set.problems))
    if num >= len(texts):
        raise UserError(
            f"eval.holdout={num}: {problem_set.name} has only {len(texts)} different problems"
            f"{problem_set.refused}; take fewer"
        )
    held = set(random.Random(f"holdout:{seed}").sample(texts, num))
    sides: tuple[list[Problem], list[Problem]] = ([], [])
    for problem in problem_set.problems:
        sides[asked(problem) in held].append(problem)
    train, test = (replace(problem_set, problems=tuple(side)) for side in sides)
    return train, replace(test, name=f"{problem_set.name} (held out)", bad_rows=())


def describe_data(
    config: Config, problems: ProblemSet, held_out: ProblemSet | None
) -> list[str]:
    """What a user should know of a run's data before anything is computed: one entry a fact."""
    said = [describe_bad_rows(problems), _describe_contradictions(problems)]
    counts = Counter(problem.source_index for problem in problems.problems)
    weights = [part.weight for part in config.data.sources]
    for number, source in enumerate(problems.sources):
        num = counts[number]
        wanted = round(config.data.prompts_per_step * weights[number] / sum(weights), 1)
        if 0 < num < wanted * config.run.steps:
            said.append(
                f"{config.run.steps} steps of {wanted:g} problems use each of the {num} "
                f"problems of {source} {wanted * config.run.steps / num:.1f} times"
            )
    if held_out is None:
        said.append(
            f"nothing is evaluated: {config.data.name} has no held-out problems; set eval.data, "
            "or eval.holdout=N to take N of its problems out of training"
        )
    elif bad := describe_bad_rows(held_out):
        said.append(f"held out: {bad}")
    return [line for line in said if line]


def _describe_contradictions(problem_set: ProblemSet) -> str:
    """How many problems have several gold answers, and the first of them; "" if none."""
    answers: dict[tuple[str, ...], dict[str, Problem]] = {}
    for problem in problem_set.problems:
        written = "".join(problem.answer.split())
        answers.setdefault(asked(problem), {}).setdefault(written, problem)
    several = [
        [*by_answer.values()] for by_answer in answers.values() if len(by_answer) > 1
    ]
    if not several:
        return ""
    first, second = several[0][:2]
    return (
        f"{len(several)} of {len(answers)} problems have several gold answers, such as "
        f"{first.answer!r} in row {first.row} and {second.answer!r} in row {second.row}: one of "
        "them teaches what is wrong"
    )


def describe_bad_rows(problem_set: ProblemSet, limit: int = 5) -> str:
    """How many rows were left out, the first of them, how many more; "" if none."""
    bad_rows = sorted(problem_set.bad_rows, key=lambda bad: bad.row)
    if not bad_rows:
        return ""
    num_rows = len(problem_set.problems) + len(bad_rows)
    lines = [f"{problem_set.name}: {len(bad_rows)} of {num_rows} rows left out"]
    lines += [f"  {bad.source}:{bad.row}: {bad.reason}" for bad in bad_rows[:limit]]
    if len(bad_rows) > limit:
        lines.append(f"  ... and {len(bad_rows) - limit} more")
    return "\n".join(lines)


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
        return [
            self._at(position) for position in range(first, first + self.batch_size)
        ]

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
                name = (
                    f"{self.seed}:{number}" if len(self.members) > 1 else f"{self.seed}"
                )
                epoch, offset = divmod(before, len(members))
                return members[_permutation(name, epoch, len(members))[offset]]
            position -= before
        raise AssertionError("the last source has the whole share")


@lru_cache(maxsize=32)
def _permutation(name: str, epoch: int, num_problems: int) -> tuple[int, ...]:
    order = list(range(num_problems))
    random.Random(f"epoch:{name}:{epoch}").shuffle(
        order
    )  # a generator of its own, seeded by text
    return tuple(order)


def order_of(problems: ProblemSet, data: DataConfig, seed: int) -> ProblemSampler:
    """The sampler of a run. Errors: `UserError` for a source that has no problem left."""
    members: list[list[int]] = [[] for _ in problems.sources]
    for index, problem in enumerate(problems.problems):
        members[problem.source_index].append(index)
    for source, indices in zip(problems.sources, members, strict=True):
        if not indices:
            raise UserError(
                f"data.train: no problem of {source} is left; take it out of the list"
            )
    return ProblemSampler(
        members=tuple(map(tuple, members)),
        weights=tuple(part.weight for part in data.sources),
        batch_size=data.prompts_per_step,
        seed=seed,
    )
