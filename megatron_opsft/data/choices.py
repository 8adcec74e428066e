"""Which of the problems that were read a run trains on: what is left out becomes bad rows."""

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megatron_opsft.data.problems import ProblemSet
from megatron_opsft.errors import PromptError, UserError
from megatron_opsft.records import Problem

Duplicates = Literal["keep", "first", "drop"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SameProblem:
    """indices: of the rows of one problem, in order; contradicts: they have different answers."""

    indices: tuple[int, ...]
    contradicts: bool


def find_duplicates(problem_set: ProblemSet) -> list[SameProblem]:
    """Problems of several rows. Two problems are the same if their texts are, but for white
    space.
    """
    groups: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, problem in enumerate(problem_set.problems):
        texts = (*(message.content for message in problem.before), problem.text)
        groups[tuple(" ".join(text.split()) for text in texts)].append(index)
    answers = [problem.answer.strip() for problem in problem_set.problems]
    return [
        SameProblem(indices=tuple(same), contradicts=len({answers[index] for index in same}) > 1)
        for same in groups.values()
        if len(same) > 1
    ]


def leave_out_duplicates(problem_set: ProblemSet, mode: Duplicates) -> ProblemSet:
    """keep: nothing is left out; first: all but the first row of a problem; drop: problems with
    different answers too. Errors: `UserError` where nothing would be left.
    """
    if mode == "keep":
        return problem_set
    reasons: dict[int, str] = {}
    for same in find_duplicates(problem_set):
        first = same.indices[0]
        place = f"row {problem_set.rows[first]}"
        if len(problem_set.sources) > 1:
            place += f" of {problem_set.source_of(first)}"
        left_out, what = same.indices[1:], "repeats"
        if mode == "drop" and same.contradicts:
            left_out, what = same.indices, "rows of this problem have different answers"
        reasons |= dict.fromkeys(left_out, f"{what}: {place} has the same problem")
    if len(reasons) == len(problem_set.problems):
        raise UserError(
            f"data.duplicates={mode}: {problem_set.name} has no problem that is left; use keep"
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
    """Share of a problem's responses that were correct; gold: what they were held against."""

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
                f"data.pass_rate_from: it was of other problems: the answer of {problem.id} is "
                f"{found.gold!r} there, {problem.answer!r} in {problem_set.source_of(index)}"
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
