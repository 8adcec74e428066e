"""Problems chosen by how often a model solved them in an evaluation."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_opsft.data.problems import BadRow, ProblemSet
from megatron_opsft.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRate:
    """Share of a problem's responses that were correct; gold: what they were held against."""

    rate: float
    gold: str


def keep_by_pass_rate(
    problem_set: ProblemSet, rates: Mapping[str, PassRate], bounds: tuple[float, float]
) -> ProblemSet:
    """Problems whose rate is within the bounds, both included; the others are bad rows, and those
    that were not evaluated. rates: by problem id. Errors: `UserError` for an evaluation of other
    problems, and where nothing is left.
    """
    low, high = bounds
    kept: list[int] = []
    left_out: list[BadRow] = []
    for index, problem in enumerate(problem_set.problems):
        found = rates.get(problem.id)
        if found is not None and found.gold != problem.answer:
            raise UserError(
                f"data.pass_rate_from: it was of other problems: the answer of {problem.id} is "
                f"{found.gold!r} there, {problem.answer!r} in {problem_set.source_of(index)}"
            )
        if found is not None and low <= found.rate <= high:
            kept.append(index)
            continue
        why = "was not evaluated" if found is None else f"is {found.rate:g}"
        reason = f"its pass rate {why}; data.pass_rate={low:g} to {high:g}"
        left_out.append(
            BadRow(source=problem_set.source_of(index), row=problem_set.rows[index], reason=reason)
        )
    if not kept:
        raise UserError(
            f"data.pass_rate={low:g} to {high:g}: none of the {len(problem_set.problems)} problems "
            f"of {problem_set.name} is left (the first: {left_out[0].reason.split(';')[0]}); "
            "evaluate on this data, or widen the bounds"
        )
    digest = hashlib.sha256(f"{problem_set.sha256} {kept}".encode())
    chosen = problem_set.pick(kept, sha256=digest.hexdigest())
    return replace(chosen, bad_rows=problem_set.bad_rows + tuple(left_out))
