"""The same problem in several rows: counted, and left out where that is asked for."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from megatron_opsft.data.problems import BadRow, ProblemSet
from megatron_opsft.errors import UserError
from megatron_opsft.records import Problem

Duplicates = Literal["keep", "first", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DuplicateCounts:
    """repeated: rows whose problem an earlier row has; contradicting: problems whose rows have
    different answers.
    """

    repeated: int
    contradicting: int


def count_duplicates(problem_set: ProblemSet) -> DuplicateCounts:
    """Two problems are the same if their texts are, but for white space."""
    groups = _group(problem_set)
    return DuplicateCounts(
        repeated=sum(len(indices) - 1 for indices in groups),
        contradicting=sum(_contradicts(problem_set, indices) for indices in groups),
    )


def leave_out_duplicates(problem_set: ProblemSet, mode: Duplicates) -> ProblemSet:
    """keep: nothing is left out; first: all but the first row of a problem; drop: problems with
    different answers too. What is left out becomes bad rows. Errors: `UserError` where nothing
    would be left.
    """
    if mode == "keep":
        return problem_set
    reasons: dict[int, str] = {}
    for indices in _group(problem_set):
        first = _place_of(problem_set, indices[0])
        contradicts = mode == "drop" and _contradicts(problem_set, indices)
        for index in indices if contradicts else indices[1:]:
            what = "rows of this problem have different answers" if contradicts else "repeats"
            reasons[index] = f"{what}: {first} has the same problem"
    kept = [index for index in range(len(problem_set.problems)) if index not in reasons]
    if not kept:
        raise UserError(
            f"data.duplicates={mode}: {problem_set.name} has no problem that is left; use keep"
        )
    digest = hashlib.sha256(f"{problem_set.sha256} {kept}".encode())
    left_out = tuple(
        BadRow(source=problem_set.source_of(index), row=problem_set.rows[index], reason=reason)
        for index, reason in sorted(reasons.items())
    )
    sha256 = digest.hexdigest() if reasons else problem_set.sha256
    chosen = problem_set.pick(kept, sha256=sha256)
    return replace(chosen, bad_rows=problem_set.bad_rows + left_out)


def describe_duplicates(counts: DuplicateCounts, mode: Duplicates) -> str:
    """For the user; "" where there is nothing to say. mode: what is done about them."""
    if not counts.repeated or mode != "keep":
        return ""
    return (
        f"{counts.repeated} rows repeat a problem of an earlier row, {counts.contradicting} "
        "problems have rows with different answers; data.duplicates=first keeps the first row, "
        "drop leaves out the contradicting ones as well"
    )


def _group(problem_set: ProblemSet) -> Iterable[list[int]]:
    """Indices of the same problem, in order."""
    groups: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, problem in enumerate(problem_set.problems):
        groups[_key_of(problem)].append(index)
    return groups.values()


def _place_of(problem_set: ProblemSet, index: int) -> str:
    row = f"row {problem_set.rows[index]}"
    return f"{row} of {problem_set.source_of(index)}" if problem_set.parts else row


def _key_of(problem: Problem) -> tuple[str, ...]:
    """Equal for the same problem."""
    texts = (*(message.content for message in problem.before), problem.text)
    return tuple(" ".join(text.split()) for text in texts)


def _contradicts(problem_set: ProblemSet, indices: list[int]) -> bool:
    if len(indices) == 1:
        return False
    return len({problem_set.problems[index].answer.strip() for index in indices}) > 1
