"""Groups of responses as a method sees them, without tokens or text; metrics of a step's responses;
and the file of a reference model's lengths and accuracy.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from megatron_opsft.errors import UserError, looked_in
from megatron_opsft.records import (
    LengthOf,
    Outcome,
    Response,
    Thinking,
    TokenUse,
    record,
)

LengthKind = Literal["exact", "max"]


@record
class LengthTarget:
    """The length that a prompt asks for."""

    num_tokens: int
    kind: LengthKind = "exact"
    """exact: this many tokens; max: at most this many."""


@record
class PromptChange:
    """Text that a method adds to a problem's prompt."""

    system: str = ""
    """A system message; "": none."""
    suffix: str = ""
    """The end of the user's message."""


@record
class ReferenceStatistics:
    """The reference model's responses to one problem."""

    mean_tokens: float
    accuracy: float
    """Share of correct responses."""


@record
class Group:
    """All responses to one problem."""

    responses: Sequence[Response]
    limit: int
    """Most tokens that a response could have."""
    problem_id: str = ""
    target: LengthTarget | None = None
    """The length that the prompt asked for."""
    reference: ReferenceStatistics | None = None
    """The reference model's responses to the same problem."""
    length_of: LengthOf = "response"
    """What `method.length_of` takes for a response's length."""

    @property
    def token_counts(self) -> list[int]:
        """Tokens of every response, whatever `length_of` is: what a token of it weighs."""
        return [response.num_tokens for response in self.responses]

    @property
    def lengths(self) -> list[int]:
        """Length of every response, in tokens."""
        return [response.length(self.length_of) for response in self.responses]

    @property
    def correct_lengths(self) -> list[int]:
        """Length of every correct response, in tokens."""
        pairs = zip(self.responses, self.lengths, strict=True)
        return [length for response, length in pairs if response.correct]

    @property
    def verdicts(self) -> list[float]:
        """1 for each correct response, 0 for the others."""
        return [float(response.correct) for response in self.responses]

    def within(self, limit: int) -> list[float]:
        """1 for each response that is correct, finished and no longer than `limit`, else 0."""
        accepted = [r.is_accepted(limit, self.length_of) for r in self.responses]
        return list(map(float, accepted))

    @property
    def stored_advantages(self) -> list[float]:
        """The advantage of every response, as its row of the fixed data says."""
        return [response.advantage for response in self.responses]

    @property
    def num_correct(self) -> int:
        """Number of correct responses."""
        return sum(response.correct for response in self.responses)

    @property
    def pass_rate(self) -> float:
        """Share of correct responses."""
        return self.num_correct / len(self.responses)


def accuracy_of(batch: Sequence[Group]) -> float:
    """Share of correct responses in all groups together."""
    num_correct = sum(group.num_correct for group in batch)
    return num_correct / sum(len(group.responses) for group in batch)


def select(responses: Sequence[Response], max_response_tokens: int) -> list[Response]:
    """Return the accepted responses (correct, finished, no longer than this), in order."""
    return [
        response for response in responses if response.is_accepted(max_response_tokens)
    ]


def describe_lengths(responses: Sequence[Response]) -> dict[str, float | int]:
    """Metrics of a step's responses that need no verdict, as for fixed data."""
    return {
        "num_rollouts": len(responses),
        "mean_response_tokens": sum(r.num_tokens for r in responses) / len(responses),
    }


def describe_rollouts(
    responses: Sequence[Response], limit: int
) -> dict[str, float | int]:
    """Metrics of a step's responses on all ranks: counts, shares in [0, 1], lengths in tokens.

    limit: most tokens of an accepted response.
    """
    outcomes = [response.outcome for response in responses]
    accepted_lengths = [response.num_tokens for response in select(responses, limit)]
    num_accepted, num_rollouts = len(accepted_lengths), len(responses)
    return {
        **describe_lengths(responses),
        "num_accepted": num_accepted,
        "accept_rate": num_accepted / num_rollouts,
        "accuracy": outcomes.count(Outcome.CORRECT) / num_rollouts,
        "truncated_share": outcomes.count(Outcome.UNFINISHED) / num_rollouts,
        "num_unfinished": outcomes.count(Outcome.UNFINISHED),
        "num_wrong": outcomes.count(Outcome.WRONG),
        "num_no_answer": outcomes.count(Outcome.NO_ANSWER),
        "verify_timeouts": outcomes.count(Outcome.TIMEOUT),
        "num_unclosed_think": sum(response.unclosed_think for response in responses),
        "verify_errors": outcomes.count(Outcome.ERROR),
        "mean_accepted_tokens": sum(accepted_lengths) / max(num_accepted, 1),
        "max_accepted_tokens": max(accepted_lengths, default=0),
    }


def describe_token_use(responses: Sequence[Response]) -> dict[str, float | int]:
    """Metrics of the overthinking meter over the finished responses, which the verifier has read;
    a metric that none of them has is left out.
    """
    used = []
    for response in responses:
        if response.finished and response.token_use is not None:
            used.append((response.token_use, response.num_tokens))
    if not used:
        return {}
    sums = sums_of_token_use(used)
    metrics: dict[str, float | int] = {
        name: over / under for name, (over, under) in sums.items() if under
    }
    forms = [use.thinking for use, _ in used]
    metrics["num_empty_think"] = forms.count(Thinking.EMPTY)
    metrics["num_malformed_think"] = forms.count(Thinking.MALFORMED)
    if num_stating := sums["mean_tokens_to_right"][1]:
        metrics["num_stating_right"] = num_stating
    return metrics


def sums_of_token_use(
    used: Sequence[tuple[TokenUse, int]],
) -> dict[str, tuple[float, int]]:
    """Return the two sums whose ratio each metric of the overthinking meter is, by its name; the
    second is 0 for a metric that no response has.

    used: where the tokens of each finished response went, and how many there are.
    """
    uses = [use for use, _ in used]
    num_thinking = sum(use.num_thinking for use in uses)
    stating = [(use.first_right, n) for use, n in used if use.first_right is not None]
    num_to_right = sum(place for place, _ in stating)
    num_of_stating = sum(num_tokens for _, num_tokens in stating)
    return {
        "mean_thinking_tokens": (num_thinking, len(used)),
        "mean_answer_tokens": (sum(n for _, n in used) - num_thinking, len(used)),
        "mean_doubts": (sum(use.num_doubts for use in uses), len(used)),
        "repeated_share": (sum(use.repeated_share for use in uses), len(used)),
        "mean_leaked_tokens": (sum(use.num_leaked for use in uses), len(used)),
        "mean_tokens_to_right": (num_to_right, len(stating)),
        "after_right_share": (num_of_stating - num_to_right, num_of_stating),
        "mean_restated": (sum(use.num_restated for use in uses), len(stating)),
    }


def read_references(path: Path) -> dict[str, ReferenceStatistics]:
    """Read the reference model's statistics, by problem id.

    A line is `{"problem_id": ..., "mean_tokens": ..., "accuracy": ...}`. Errors: `UserError` that
    names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"method.references={path} cannot be read: {reason}{looked_in(path)}"
        ) from None
    references = {}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            mean_tokens, accuracy = float(row["mean_tokens"]), float(row["accuracy"])
            is_possible = mean_tokens > 0 and 0 <= accuracy <= 1
        except (ValueError, KeyError, TypeError):
            is_possible = False
        if not is_possible:
            raise UserError(
                f"method.references={path}, line {number}: write an object with problem_id, "
                "mean_tokens above 0 and accuracy between 0 and 1"
            )
        references[str(row.get("problem_id"))] = ReferenceStatistics(
            mean_tokens=mean_tokens, accuracy=accuracy
        )
    return references


def check_references(
    references: Mapping[str, object], problem_ids: Iterable[str], path: Path
) -> None:
    """Raise `UserError` if a problem of the run has no line in the file."""
    missing = [id for id in problem_ids if id not in references]
    if missing:
        raise UserError(
            f"method.references={path} has no line for {len(missing)} problems, the first "
            f"{missing[0]}; add them, or train on the others"
        )


def check_monitor(monitor: Iterable[str], held_out: Iterable[str]) -> None:
    """Raise `UserError` if a monitor problem has the text of an evaluation problem."""
    shared = set(monitor) & set(held_out)
    if shared:
        raise UserError(
            f"{len(shared)} monitor problems of the method are evaluation problems too, such as "
            f"{min(shared)[:60]!r}: targets would be chosen on them; train on other data, or set "
            "eval.data"
        )
