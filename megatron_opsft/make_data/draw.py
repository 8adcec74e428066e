"""Responses to a chunk of problems, and what of them every rank can know."""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from megatron_opsft.data.stored_responses import StoredResponse
from megatron_opsft.errors import NonFiniteError
from megatron_opsft.records import Problem, Response, Sample
from megatron_opsft.runtime.distributed import gather_from_all
from megatron_opsft.runtime.phase import Stopwatch
from megatron_opsft.session import Session
from megatron_opsft.step.judged_problems import JudgedProblems, judge_problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Judged responses to some problems; every rank calls every method."""

    session: Session
    judged: JudgedProblems

    @property
    def by_problem(self) -> Iterator[tuple[Problem, list[Response]]]:
        """Each problem with the facts of its responses, the same on every rank."""
        for index, found in groupby(self.judged.responses, key=attrgetter("problem_index")):
            yield self.judged.problems[index], list(found)

    def texts(self) -> dict[tuple[int, int], str]:
        """A digest of each response's text, by rank and index, to know equal ones."""
        mine = [
            (self.session.layout.rank, index, hashlib.sha256(rollout.text.encode()).hexdigest())
            for index, rollout in enumerate(self.judged.rollouts)
        ]
        return {(rank, index): digest for rank, index, digest in gather_from_all(mine)}

    def samples(self, chosen: Sequence[Response]) -> list[Sample]:
        """Their tokens, in order, on every rank."""
        if not chosen:
            return []
        everything = [range(len(chosen))] * self.session.layout.dp_size
        found = self.session.fetch(self.judged.rollouts, self.judged.problems, chosen, everything)
        return [found[index] for index in range(len(chosen))]


def draw_responses(
    session: Session,
    problems: Sequence[Problem],
    num_samples: int,
    limit: int,
    *,
    seed_step: int = 1,
    encode: Callable[[Problem], tuple[int, ...]] | None = None,
) -> Draw:
    """As `judge_problems`. Responses do not depend on how problems are cut into chunks."""
    watch = Stopwatch(session.device)
    judged = judge_problems(
        session,
        problems,
        watch,
        num_samples=num_samples,
        limit=limit,
        seed_step=seed_step,
        encode=encode,
    )
    return Draw(session=session, judged=judged)


def scores_of(
    session: Session,
    samples: Sequence[Sample],
    *,
    temperature: float = 1.0,
    entropy: bool = False,
) -> list[tuple[float, ...]]:
    """See `Trainer.score`, in passes of as many tokens as the training step's.

    Errors: `NonFiniteError`, before anything is chosen by scores that cannot be compared.
    """
    budget = session.config.train.max_tokens_per_microbatch * session.layout.cp_size
    with Stopwatch(session.device).phase("score"):
        found = [
            scores
            for part in _within(samples, budget)
            for scores in session.trainer.score(part, temperature=temperature, entropy=entropy)
        ]
    if not all(math.isfinite(score) for scores in found for score in scores):
        raise NonFiniteError("the model's log-probs of its own responses are NaN or infinite")
    return found


def _within(samples: Sequence[Sample], budget: int) -> Iterator[list[Sample]]:
    """In order, in parts of at most so many tokens; a longer one is a part of its own."""
    part: list[Sample] = []
    num_tokens = 0
    for sample in samples:
        length = len(sample.prompt_ids) + len(sample.response_ids)
        if part and num_tokens + length > budget:
            yield part
            part, num_tokens = [], 0
        part.append(sample)
        num_tokens += length
    if part:
        yield part


def stored_of(sample: Sample, advantage: float = 1.0) -> StoredResponse:
    """A sampled response as it is."""
    return StoredResponse(
        problem_id=sample.problem_id,
        prompt_ids=sample.prompt_ids,
        response_ids=sample.response_ids,
        advantage=advantage,
    )
