"""Which of the problems that were read a run trains on, and what a user should know of them; what
is left out becomes bad rows.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

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
    sides: tuple[list[Problem], list[Problem]] = ([], [])
    for problem in problem_set.problems:
        sides[problem.text in held].append(problem)
    train, test = (replace(problem_set, problems=tuple(side)) for side in sides)
    return train, replace(test, name=f"{problem_set.name} (held out)", bad_rows=())


def describe_data(config: Config, problems: ProblemSet, held_out: ProblemSet | None) -> list[str]:
    """What a user should know of a run's data before anything is computed: one entry a fact."""
    said = [describe_bad_rows(problems)]
    counts, weights = (
        Counter(p.part for p in problems.problems),
        [part.weight for part in config.data.parts],
    )
    for number, source in enumerate(problems.sources):
        num, per_step = counts[number], config.data.prompts_per_step
        wanted = round(per_step * weights[number] / sum(weights), 1)
        if wanted * config.run.steps > num:
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
