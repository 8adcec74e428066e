"""Responses to problems, with verdicts."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_opsft.records import Problem, Response, Rollout, Verdict
from megatron_opsft.run.start.session import Session
from megatron_opsft.runtime.phase import Stopwatch
from megatron_opsft.trainer.batching.exchange import share_facts


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedProblems:
    """rollouts, verdicts: this rank's; responses: facts of all ranks' responses, in the order of
    `problems` and the same on every rank.
    """

    problems: Sequence[Problem]
    rollouts: Sequence[Rollout]
    verdicts: Sequence[Verdict]
    responses: Sequence[Response]

    def followed_by(self, more: "JudgedProblems") -> "JudgedProblems":
        """Both, concatenated: indices count over all of them."""
        held = Counter(response.rank for response in self.responses)
        moved = (
            r._replace(
                problem_index=r.problem_index + len(self.problems),
                rollout_index=r.rollout_index + held[r.rank],
            )
            for r in more.responses
        )
        return JudgedProblems(
            problems=[*self.problems, *more.problems],
            rollouts=[*self.rollouts, *more.rollouts],
            verdicts=[*self.verdicts, *more.verdicts],
            responses=[*self.responses, *moved],
        )


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
        opened = s.encoder.opens_think
        responses = share_facts(rollouts, verdicts, problems, prompts_open_think=opened)
    return JudgedProblems(
        problems=problems, rollouts=rollouts, verdicts=verdicts, responses=responses
    )
