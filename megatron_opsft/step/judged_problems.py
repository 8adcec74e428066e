"""Responses to problems, with verdicts."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_opsft.records import Problem, Response, Rollout, Verdict
from megatron_opsft.runtime.phase import Stopwatch
from megatron_opsft.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedProblems:
    """rollouts, verdicts: this rank's; responses: facts of all ranks' responses, in the order of
    `problems` and the same on every rank.
    """

    problems: Sequence[Problem]
    rollouts: Sequence[Rollout]
    verdicts: Sequence[Verdict]
    responses: Sequence[Response]


def judge_problems(
    s: Session,
    problems: Sequence[Problem],
    watch: Stopwatch,
    *,
    num_samples: int,
    limit: int,
    seed_step: int,
    encode: Callable[[Problem], tuple[int, ...]] | None = None,
) -> JudgedProblems:
    """`num_samples` responses to each problem, of at most `limit` tokens, with verdicts. Called by
    every rank.

    seed_step: what their seeds depend on; encode: the prompts, if not the method's.
    """
    with watch.phase("rollout"):
        rollouts = s.sampler.sample(
            problems,
            replace(s.settings, max_response_tokens=limit),
            num_samples=num_samples,
            step=seed_step,
            encode=encode or s.prompt_of,
        )
    with watch.phase("verify"):
        verdicts = s.verifier.score(rollouts, {p.id: p for p in problems})
        responses = s.share_facts(rollouts, verdicts, problems)
    return JudgedProblems(
        problems=problems, rollouts=rollouts, verdicts=verdicts, responses=responses
    )


def join_draws(parts: Sequence[JudgedProblems]) -> JudgedProblems:
    """The draws one behind the other: indices count over all of them."""
    if len(parts) == 1:
        return parts[0]
    joined: list[Response] = []
    held: Counter[int] = Counter()  # of each rank, in the draws before
    num_problems = 0
    for part in parts:
        joined += [
            r._replace(
                problem_index=r.problem_index + num_problems,
                rollout_index=r.rollout_index + held[r.rank],
            )
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
