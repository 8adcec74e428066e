"""Which of the problems that were read a run trains on, and what a user should know of them; what
is left out becomes bad rows.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_opsft.config import Config
from megatron_opsft.data.problems import ProblemSet
from megatron_opsft.errors import PromptError, UserError
from megatron_opsft.records import Problem


def drop_unusable_prompts(
    problem_set: ProblemSet, encode: Callable[[Problem], Sequence[int]], max_prompt_tokens: int
) -> ProblemSet:
    """Leave out the problems whose encoded prompt is longer than the limit, and those that `encode`
    refuses. Errors: `UserError` where nothing is left.
    """
    reasons: dict[int, str] = {}
    for index, problem in enumerate(problem_set.problems):
        try:
            num_tokens = len(encode(problem))
        except PromptError as error:
            reasons[index] = str(error)
            continue
        if num_tokens > max_prompt_tokens:
            reasons[index] = (
                f"prompt of {num_tokens} tokens, more than data.max_prompt_tokens="
                f"{max_prompt_tokens}"
            )
    return problem_set.leave_out(reasons)


def take_held_out(problem_set: ProblemSet, num: int, seed: int) -> tuple[ProblemSet, ProblemSet]:
    """(what is left to train on, `num` problems drawn with `seed`); all rows of one text are on one
    side. Errors: `UserError` where nothing would be left.
    """
    texts = list(dict.fromkeys(problem.text for problem in problem_set.problems))
    if num >= len(texts):
        raise UserError(
            f"eval.holdout={num}: {problem_set.name} has only {len(texts)} different problems; "
            "take fewer"
        )
    held = set(random.Random(f"holdout:{seed}").sample(texts, num))
    sides: tuple[list[int], list[int]] = ([], [])
    for index, problem in enumerate(problem_set.problems):
        sides[problem.text in held].append(index)
    train, test = map(problem_set.pick, sides)
    return train, replace(test, name=f"{problem_set.name} (held out)", bad_rows=())


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRate:
    """Share of a problem's responses that were correct; gold: the answer to compare with."""

    rate: float
    gold: str


def keep_by_pass_rate(
    problem_set: ProblemSet, rates: Mapping[str, PassRate], bounds: tuple[float, float]
) -> ProblemSet:
    """Problems whose rate is within the bounds, both included. rates: by problem id; what was not
    evaluated is left out too. Errors: `UserError` for an evaluation of other problems, and where
    nothing is left.
    """
    low, high = bounds
    reasons: dict[int, str] = {}
    for index, problem in enumerate(problem_set.problems):
        found = rates.get(problem.id)
        if found is not None and found.gold != problem.answer:
            raise UserError(
                "data.pass_rate_from: that evaluation had other problems: its answer to "
                f"{problem.id} is {found.gold!r}, and {problem_set.source_of(index)} has "
                f"{problem.answer!r}"
            )
        if found is None or not low <= found.rate <= high:
            why = "was not evaluated" if found is None else f"is {found.rate:g}"
            reasons[index] = f"its pass rate {why}; data.pass_rate={low:g} to {high:g}"
    if len(reasons) == len(problem_set.problems):
        raise UserError(
            f"data.pass_rate={low:g} to {high:g}: none of the {len(reasons)} problems of "
            f"{problem_set.name} is left (the first: {reasons[0].split(';')[0]}); evaluate on this "
            "data, or widen the bounds"
        )
    return problem_set.leave_out(reasons)


def describe_data(config: Config, problems: ProblemSet, held_out: ProblemSet | None) -> list[str]:
    """What a user should know of a run's data before anything is computed: one entry a fact."""
    said = [describe_bad_rows(problems)]
    counts, weights = Counter(problems.parts), [part.weight for part in config.data.parts]
    for number, source in enumerate(problems.sources):
        num, per_step = counts[number], config.data.prompts_per_step
        wanted = round(per_step * weights[number] / sum(weights), 1)
        if wanted > num:
            said.append(
                f"data.prompts_per_step={wanted:g} is more than the {num} problems of {source}: "
                "every step repeats some of them"
            )
        elif wanted * config.run.steps > num:
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
