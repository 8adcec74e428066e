"""The training problems of a run: one source or several as one problem set, without problems that
cannot be used or are held out. Which of them a step draws, and notes on them for the user.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from math import floor

from megatron_opsft.config import DataConfig
from megatron_opsft.data.problems import (
    ALSO_IN,
    REPEATS,
    BadRow,
    ProblemSet,
    fields_of,
    load_problems,
    place_of,
)
from megatron_opsft.errors import PromptError, UserError, plural
from megatron_opsft.records import Problem, record
from megatron_opsft.runtime.formatting import count_of

# From so many uses of each problem on a run may learn the answers by heart, and says so. Below that
# a last batch has merely begun a second pass, as nearly every batch size does.
_OFTEN = 2


def load_training(data: DataConfig, *, with_fields: bool) -> ProblemSet:
    """Read the problems of `data.train`, one source or several. Errors: `UserError`."""
    problems = {}
    bad_rows: list[BadRow] = []
    for index, source in enumerate(data.sources):
        problem_set = load_problems(
            source.path,
            split=str(source.split),
            **fields_of(source),
            template=data.template,
            with_fields=with_fields,
        )
        bad_rows += problem_set.bad_rows
        for problem in problem_set.problems:
            unique_id = problem.id
            # If an earlier source has the id, the number of this source is added to it.
            while unique_id in problems:
                unique_id = f"{unique_id}@{index + 1}"
            problems[unique_id] = replace(problem, id=unique_id, source_index=index)
    return ProblemSet(
        name=data.name,
        problems=tuple(problems.values()),
        bad_rows=tuple(bad_rows),
        sources=tuple(source.path for source in data.sources),
    )


def _leave_out(
    problem_set: ProblemSet, reason_against: Callable[[Problem], str]
) -> ProblemSet:
    """Leave out the problems with a reason against them ("" for none); they become bad rows."""
    problems = []
    bad_rows = list(problem_set.bad_rows)
    for problem in problem_set.problems:
        if reason := reason_against(problem):
            source = problem_set.sources[problem.source_index]
            bad_rows.append(BadRow(source=source, row=problem.row, reason=reason))
        else:
            problems.append(problem)
    return replace(problem_set, problems=tuple(problems), bad_rows=tuple(bad_rows))


def drop_unusable_prompts(
    problem_set: ProblemSet,
    encode: Callable[[Problem], Sequence[int]],
    max_prompt_tokens: int,
) -> ProblemSet:
    """Leave out the problems whose encoded prompt is longer than the limit, and those that `encode`
    refuses: they become bad rows. Errors: `UserError` if no problem remains.
    """

    def reason_against(problem: Problem) -> str:
        try:
            num_tokens = len(encode(problem))
        except PromptError as error:
            return str(error)
        if num_tokens <= max_prompt_tokens:
            return ""
        return (
            f"prompt of {num_tokens} tokens, more than data.max_prompt_tokens="
            f"{max_prompt_tokens}"
        )

    return _leave_out(problem_set, reason_against).checked()


def asked(problem: Problem) -> tuple[str, ...]:
    """Return the text of each message of a problem, without differences in white space."""
    messages = [message.content for message in problem.before]
    return tuple(" ".join(text.split()) for text in [*messages, problem.text])


def leave_out_held_out(
    training: ProblemSet, held_out: Mapping[str, ProblemSet]
) -> ProblemSet:
    """Leave out the training problems that an evaluation also asks; they become bad rows.

    held_out: the sets of the evaluations, by their names in messages. Errors: `UserError` if no
    problem remains.
    """
    reasons = {}
    for name, evaluation in held_out.items():
        for problem in evaluation.problems:
            reason = f"{ALSO_IN} {name}: what is evaluated is not trained on"
            reasons[asked(problem)] = reason
    left = _leave_out(training, lambda problem: reasons.get(asked(problem), ""))
    if not left.problems:
        raise UserError(
            f"data.train={training.name}: all of its {len(training.problems)} problems are also in "
            f"{' or '.join(held_out)}, and what is evaluated is not trained on; train on others, "
            "or set eval.holdout=N instead, which takes N problems out of training"
        )
    return left


def take_held_out(
    problem_set: ProblemSet, num: int, seed: int
) -> tuple[ProblemSet, ProblemSet]:
    """Split the set: (problems to train on, held-out ones drawn with `seed`). The held-out ones are
    `num` different problems; another row that asks one of them becomes a bad row of the others.
    Errors: `UserError` if nothing would remain to train on.
    """
    # Each different text once, in order: the draw must not depend on hashes.
    texts = list(dict.fromkeys(map(asked, problem_set.problems)))
    if num >= len(texts):
        raise UserError(
            f"eval.holdout={num}: {problem_set.name} has only {len(texts)} different problems"
            f"{problem_set.refused}; take fewer"
        )
    held_out_texts = set(random.Random(f"holdout:{seed}").sample(texts, num))
    held_out: dict[tuple[str, ...], Problem] = {}  # by what they ask
    for problem in problem_set.problems:
        if asked(problem) in held_out_texts:
            held_out.setdefault(asked(problem), problem)

    def reason_against(problem: Problem) -> str:
        first = held_out.get(asked(problem))
        if first is None:
            return ""
        place = place_of(problem_set.sources[first.source_index], first.row)
        answer = "" if problem.answer == first.answer else ", with another answer"
        return f"{REPEATS} {place}, which is held out{answer}"

    taken = {problem.id for problem in held_out.values()}
    others = [problem for problem in problem_set.problems if problem.id not in taken]
    name = f"{problem_set.name} (held out)"
    return (
        _leave_out(replace(problem_set, problems=tuple(others)), reason_against),
        replace(problem_set, problems=tuple(held_out.values()), name=name, bad_rows=()),
    )


def describe_data(
    data: DataConfig,
    steps: int,
    problems: ProblemSet,
    held_out: ProblemSet | None,
    *,
    num_taken: int = 0,
) -> list[str]:
    """Return notes for the user on the data of a run of `steps` steps, one string for each fact.

    num_taken: how many rows of its sources are held out by `take_held_out`.
    """
    notes = [
        describe_bad_rows(problems, num_taken=num_taken),
        _describe_contradictions(problems),
    ]
    notes += _describe_repetition(data, steps, problems)
    if held_out is None:
        notes.append(
            f"nothing is evaluated: {data.name} has no held-out problems; set eval.data, "
            "or eval.holdout=N to take N of its problems out of training"
        )
    elif bad_rows := describe_bad_rows(held_out):
        notes.append(f"held out: {bad_rows}")
    return [note for note in notes if note]


def _describe_repetition(
    data: DataConfig, steps: int, problems: ProblemSet
) -> Iterator[str]:
    """Yield a note for each source whose problems the run uses `_OFTEN` times or more."""
    problems_of = Counter(problem.source_index for problem in problems.problems)
    weights = [source.weight for source in data.sources]
    for index, source in enumerate(problems.sources):
        num_problems = problems_of[index]
        share = data.prompts_per_step * weights[index] / sum(weights)
        per_step = round(share, 1)
        num_draws = per_step * steps
        if 0 < _OFTEN * num_problems <= num_draws:
            yield (
                f"{count_of([steps], 'step')} of {per_step:g} {plural('problem', per_step)} use "
                f"each of the {count_of([num_problems], 'problem')} of {source} "
                f"{num_draws / num_problems:.1f} times"
            )


def _describe_contradictions(problem_set: ProblemSet) -> str:
    """Say how many problems have several gold answers, and show the first of them; "" if none."""
    # Text of a problem -> gold answer -> the first problem with that text and that answer.
    by_text: dict[tuple[str, ...], dict[str, Problem]] = {}
    for problem in problem_set.problems:
        answer = "".join(problem.answer.split())
        by_text.setdefault(asked(problem), {}).setdefault(answer, problem)
    contradictions = [by_answer for by_answer in by_text.values() if len(by_answer) > 1]
    if not contradictions:
        return ""
    first, second, *_ = contradictions[0].values()
    return (
        f"{len(contradictions)} of {len(by_text)} problems have several gold answers, such as "
        f"{first.answer!r} in row {first.row} and {second.answer!r} in row {second.row}: one of "
        "them teaches what is wrong"
    )


def describe_bad_rows(
    problem_set: ProblemSet, limit: int = 5, *, num_taken: int = 0
) -> str:
    """Say how many rows were left out, and list the first `limit` of them; "" if none.

    num_taken: usable rows that were there and are no longer in the set.
    """
    bad_rows = sorted(problem_set.bad_rows, key=lambda bad_row: bad_row.row)
    num_bad = len(bad_rows)
    if not bad_rows:
        return ""
    num_rows = len(problem_set.problems) + num_taken + num_bad
    lines = [f"{problem_set.name}: {num_bad} of {count_of([num_rows], 'row')} left out"]
    for bad_row in bad_rows[:limit]:
        lines.append(f"  {bad_row.place}: {bad_row.reason}")
    if num_bad > limit:
        lines.append(f"  ... and {num_bad - limit} more")
    return "\n".join(lines)


@record
class ProblemSampler:
    """The problems that each step trains on: a function of (seed, step) alone, the same on every
    rank.

    Draws from several sources by weight; each source repeats epoch after epoch, in a new order.
    After n draws each source has had its share of n, to within fewer draws than there are sources,
    whatever the batch size. A batch goes on into the next epoch of a source when one ends, so it
    repeats problems if a source has fewer than the batch takes. It has no state: a resumed run
    needs the step number only.
    """

    members: tuple[Sequence[int], ...]
    """The problem indices of each source, at least one."""
    weights: tuple[float, ...]
    """The weight of each source."""
    batch_size: int
    seed: int

    def indices(self, step: int) -> list[int]:
        """Return the `batch_size` problem indices of a step, counted from 0, in order."""
        first = step * self.batch_size
        return [self._at(first + position) for position in range(self.batch_size)]

    def _at(self, position: int) -> int:
        """Return the problem index at a position of the run, from 0.

        A source takes the positions at which the whole part of position x share grows. The first
        source takes its positions, the second takes its own of the remaining ones, counted anew,
        and so on. Fractions, so that the result is the same everywhere.
        """
        weights = [Fraction(str(weight)) for weight in self.weights]
        for index, members in enumerate(self.members):
            share = weights[index] / sum(weights[index:])
            num_earlier = floor(position * share)  # positions that it took before
            if floor((position + 1) * share) > num_earlier:
                name = str(self.seed)
                if len(self.members) > 1:
                    name = f"{self.seed}:{index}"
                epoch, offset = divmod(num_earlier, len(members))
                return members[_permutation(name, epoch, len(members))[offset]]
            position -= num_earlier  # counted anew among those that it left
        raise AssertionError("the last source has the whole share")


@lru_cache(maxsize=32)
def _permutation(name: str, epoch: int, num_problems: int) -> tuple[int, ...]:
    """Return the order of a source's problems in an epoch. name: of the source's random order."""
    order = list(range(num_problems))
    # A generator of its own, seeded by text.
    random.Random(f"epoch:{name}:{epoch}").shuffle(order)
    return tuple(order)


def order_of(problems: ProblemSet, data: DataConfig, seed: int) -> ProblemSampler:
    """Return the sampler of a run. Errors: `UserError` for a source that has no problem left."""
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
        weights=tuple(source.weight for source in data.sources),
        batch_size=data.prompts_per_step,
        seed=seed,
    )
