"""What a method sees of a batch: groups of responses to one problem, without tokens or text; what
there is to say of a step's responses; and the reference model's lengths and accuracy, from a file.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_opsft.errors import UserError
from megatron_opsft.records import FinishReason, Outcome, Response, Rollout

LengthKind = Literal["exact", "max"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthTarget:
    """The length in tokens that a prompt asks for: exactly, or at most."""

    num_tokens: int
    kind: LengthKind = "exact"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChange:
    """What a method adds to a problem's prompt: a system message, and the end of the user's."""

    system: str = ""
    suffix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceStatistics:
    """The reference model's responses to a problem: mean length in tokens, correct share."""

    mean_tokens: float
    accuracy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All responses to one problem; limit: the longest that they could be, in tokens."""

    responses: Sequence[Response]
    limit: int
    problem_id: str = ""
    target: LengthTarget | None = None
    reference: ReferenceStatistics | None = None

    @property
    def lengths(self) -> list[int]:
        """Tokens of every response."""
        return [response.num_tokens for response in self.responses]

    @property
    def correct_lengths(self) -> list[int]:
        """Tokens of the correct ones."""
        return [response.num_tokens for response in self.responses if response.correct]

    @property
    def verdicts(self) -> list[float]:
        """Of every response: 1 if correct, else 0."""
        return [float(response.correct) for response in self.responses]

    def within(self, limit: int) -> list[float]:
        """Of every response: 1 if it is accepted, else 0."""
        return [float(response.is_accepted(limit)) for response in self.responses]

    @property
    def stored_advantages(self) -> list[float]:
        """Of every response, where they come from fixed data: what its row says."""
        return [response.advantage for response in self.responses]

    @property
    def num_correct(self) -> int:
        """How many are correct."""
        return sum(response.correct for response in self.responses)

    @property
    def pass_rate(self) -> float:
        """The share of correct ones."""
        return self.num_correct / len(self.responses)


def accuracy_of(batch: Sequence[Group]) -> float:
    """The share of correct responses of all groups."""
    return sum(g.num_correct for g in batch) / sum(len(g.responses) for g in batch)


THINK, THINK_END = "<think>", "</think>"


def has_unclosed_think(rollout: Rollout, *, prompts_open_think: bool) -> bool:
    """Whether a finished response's thinking, begun by the prompt (prompts_open_think) or by
    itself, never ends; the verifier reads it whole and may accept it.
    """
    return (
        rollout.finish_reason is FinishReason.STOP
        and THINK_END not in rollout.text
        and (prompts_open_think or THINK in rollout.text)
    )


def select(responses: Sequence[Response], max_response_tokens: int) -> list[Response]:
    """The accepted ones, in order."""
    return [
        response for response in responses if response.is_accepted(max_response_tokens)
    ]


def describe_lengths(responses: Sequence[Response]) -> dict[str, float | int]:
    """What is known of a step's responses also where nobody has judged them: fixed data."""
    return {
        "num_rollouts": len(responses),
        "mean_response_tokens": sum(r.num_tokens for r in responses) / len(responses),
    }


def describe_rollouts(
    responses: Sequence[Response], accepted: Sequence[Response]
) -> dict[str, float | int]:
    """Metrics of all that a step has sampled on all ranks: counts, shares in [0, 1], lengths in
    tokens.
    """
    outcomes = [response.outcome for response in responses]
    accepted_lengths = [response.num_tokens for response in accepted]
    num_rollouts = len(responses)
    return {
        **describe_lengths(responses),
        "num_accepted": len(accepted),
        "accept_rate": len(accepted) / num_rollouts,
        "accuracy": outcomes.count(Outcome.CORRECT) / num_rollouts,
        "truncated_share": outcomes.count(Outcome.UNFINISHED) / num_rollouts,
        "num_unfinished": outcomes.count(Outcome.UNFINISHED),
        "num_wrong": outcomes.count(Outcome.WRONG),
        "num_no_answer": outcomes.count(Outcome.NO_ANSWER),
        "verify_timeouts": outcomes.count(Outcome.TIMEOUT),
        "num_unclosed_think": sum(response.unclosed_think for response in responses),
        "verify_errors": outcomes.count(Outcome.ERROR),
        "mean_accepted_tokens": sum(accepted_lengths) / len(accepted)
        if accepted
        else 0.0,
        "max_accepted_tokens": max(accepted_lengths, default=0),
    }


def read_references(path: Path) -> dict[str, ReferenceStatistics]:
    """By problem id, from lines `{"problem_id": ..., "mean_tokens": ..., "accuracy": ...}`.

    Errors: `UserError` that names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"method.references={path} cannot be read: {error}") from None
    found = {}
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
        found[str(row.get("problem_id"))] = ReferenceStatistics(
            mean_tokens=mean_tokens, accuracy=accuracy
        )
    return found


def check_references(
    found: Mapping[str, object], problem_ids: Iterable[str], path: Path
) -> None:
    """Errors: `UserError` where a problem of the run has none."""
    missing = [problem_id for problem_id in problem_ids if problem_id not in found]
    if missing:
        raise UserError(
            f"method.references={path} has no line for {len(missing)} problems, the first "
            f"{missing[0]}; add them, or train on the others"
        )


def check_monitor(monitor: Iterable[str], held_out: Iterable[str]) -> None:
    """Errors: `UserError` where a monitor problem is an evaluation problem too; by their texts."""
    shared = set(monitor) & set(held_out)
    if shared:
        raise UserError(
            f"{len(shared)} monitor problems of the method are evaluation problems too, such as "
            f"{min(shared)[:60]!r}: targets would be chosen on them; train on other data, or set "
            "eval.data"
        )
