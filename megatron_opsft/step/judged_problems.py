"""Responses to problems, with verdicts."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_opsft.records import Problem, ResponseFacts, Rollout, Verdict
from megatron_opsft.runtime.stopwatch import Stopwatch
from megatron_opsft.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedProblems:
    """rollouts, verdicts: this rank's; responses: facts of all ranks' responses, in the order of
    `problems` and the same on every rank.
    """

    problems: Sequence[Problem]
    rollouts: Sequence[Rollout]
    verdicts: Sequence[Verdict]
    responses: Sequence[ResponseFacts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """`num_samples` responses to each problem, of at most `limit` tokens.

    seed_step: what their seeds depend on; encode: the prompts, if not the method's.
    """

    problems: Sequence[Problem]
    num_samples: int
    limit: int
    seed_step: int
    encode: Callable[[Problem], tuple[int, ...]] | None = None


def judge_problems(s: Session, asked: Asked, watch: Stopwatch) -> JudgedProblems:
    """The responses that are asked for, with verdicts. Called by every rank."""
    problems = asked.problems
    with watch.phase("rollout"):
        rollouts = s.sampler.sample(
            problems,
            replace(s.settings, max_response_tokens=asked.limit),
            num_samples=asked.num_samples,
            step=asked.seed_step,
            encode=asked.encode or s.prompt_of,
        )
    with watch.phase("verify"):
        verdicts = s.verifier.score(rollouts, {p.id: p for p in problems})
        responses = s.share_facts(rollouts, verdicts, problems)
    return JudgedProblems(
        problems=problems, rollouts=rollouts, verdicts=verdicts, responses=responses
    )


def join_draws(parts: Sequence[JudgedProblems]) -> JudgedProblems:
    """The draws one behind the other: places and indices count over all of them."""
    if len(parts) == 1:
        return parts[0]
    joined: list[ResponseFacts] = []
    held: Counter[int] = Counter()  # of each rank, in the draws before
    num_problems = 0
    for part in parts:
        joined += [
            r._replace(place=r.place + num_problems, slot=r.slot + held[r.rank])
            for r in part.responses
        ]
        held.update(response.rank for response in part.responses)
        num_problems += len(part.problems)
    return JudgedProblems(
        problems=[problem for part in parts for problem in part.problems],
        rollouts=[rollout for part in parts for rollout in part.rollouts],
        verdicts=[verdict for part in parts for verdict in part.verdicts],
        responses=joined,
    )
