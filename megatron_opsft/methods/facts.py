"""What a method sees of a batch: groups of responses to one problem, without tokens or text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from types import MappingProxyType
from typing import Literal

from megatron_opsft.records import Outcome, ResponseFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """num_tokens: of the response, end token included; finished: it ended before the limit;
    has_answer: an answer could be read from it, right or wrong. stored: its advantage where that
    comes with a fixed data set.
    """

    num_tokens: int
    correct: bool
    finished: bool = True
    has_answer: bool = True
    stored: float = 1.0

    @staticmethod
    def of(facts: ResponseFacts) -> "Response":
        """A response that was sampled and judged."""
        return _response(facts.num_response_tokens, facts.outcome, facts.finished)


@lru_cache(maxsize=1 << 16)  # a large step has many alike, and every rank makes them all
def _response(num_tokens: int, outcome: Outcome, finished: bool) -> Response:
    return Response(
        num_tokens=num_tokens,
        correct=outcome is Outcome.CORRECT,
        finished=finished,
        has_answer=outcome not in (Outcome.NO_ANSWER, Outcome.UNFINISHED),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthTarget:
    """The length in tokens that a prompt asks for: exactly, or at most."""

    num_tokens: int
    kind: Literal["exact", "max"] = "exact"


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
    def num_correct(self) -> int:
        """How many are correct."""
        return sum(response.correct for response in self.responses)

    @property
    def pass_rate(self) -> float:
        """The share of correct ones."""
        return self.num_correct / len(self.responses)


def groups_of(
    responses: Sequence[ResponseFacts],
    problem_ids: Sequence[str],
    limit: int,
    *,
    targets: Mapping[str, LengthTarget] = MappingProxyType({}),
    references: Mapping[str, ReferenceStatistics] = MappingProxyType({}),
) -> list[Group]:
    """One group a problem. responses: of a step, in order of place and sample; problem_ids: the
    step's, by place; targets, references: by problem id.
    """
    return [
        Group(
            responses=[Response.of(facts) for facts in found],
            limit=limit,
            problem_id=problem_ids[place],
            target=targets.get(problem_ids[place]),
            reference=references.get(problem_ids[place]),
        )
        for place, found in groupby(responses, key=attrgetter("place"))
    ]


def accuracy_of(batch: Sequence[Group]) -> float:
    """The share of correct responses of all groups."""
    return sum(g.num_correct for g in batch) / sum(len(g.responses) for g in batch)
