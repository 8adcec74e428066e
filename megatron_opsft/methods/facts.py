"""What a method sees of a batch: groups of responses to one problem, without tokens or text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_opsft.records import Response

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
        """Of every response: 1 if correct, finished, and no longer than `limit`, else 0."""
        return [float(r.correct and r.finished and r.num_tokens <= limit) for r in self.responses]

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
