"""Samples responses to problems and judges them."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_opsft.records import (
    Problem,
    Response,
    Rollout,
    TokenIds,
    TokenUse,
    Verdict,
    record,
)
from megatron_opsft.run.start.session import Session
from megatron_opsft.runtime.distributed import gather_from_all
from megatron_opsft.runtime.phase import Stopwatch
from megatron_opsft.trainer.batching.exchange import share_facts


@record
class JudgedProblems:
    """Problems and judged responses to them."""

    problems: Sequence[Problem]
    rollouts: Sequence[Rollout]
    """The responses that this rank sampled."""
    verdicts: Sequence[Verdict]
    """The verdict of each of `rollouts`."""
    token_uses: Sequence[TokenUse]
    """Where the tokens of each of `rollouts` went."""
    responses: Sequence[Response]
    """Facts of all ranks' responses, in the order of `problems`; the same on every rank."""

    def followed_by(self, more: "JudgedProblems") -> "JudgedProblems":
        """Return these problems and `more`, concatenated; indices count over all of them."""
        num_rollouts = Counter(response.rank for response in self.responses)
        moved = [
            response._replace(
                problem_index=response.problem_index + len(self.problems),
                rollout_index=response.rollout_index + num_rollouts[response.rank],
            )
            for response in more.responses
        ]
        return JudgedProblems(
            problems=[*self.problems, *more.problems],
            rollouts=[*self.rollouts, *more.rollouts],
            verdicts=[*self.verdicts, *more.verdicts],
            token_uses=[*self.token_uses, *more.token_uses],
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
    encode: Callable[[Problem], TokenIds] | None = None,
) -> JudgedProblems:
    """Sample and judge `num_samples` responses of at most `limit` tokens to each problem.

    seed_step: the number on which the random seeds depend. encode: makes the prompts, by default
    `Session.prompt_of`. Called by every rank.
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
        return judge_rollouts(s, problems, rollouts)


def judge_rollouts(
    s: Session, problems: Sequence[Problem], rollouts: Sequence[Rollout]
) -> JudgedProblems:
    """Judge the responses that this rank sampled to these problems. Called by every rank.

    Errors: `UserError` on every rank if the judge has failed at all responses since the start.
    """
    verdicts = s.verifier.score(rollouts, {p.id: p for p in problems})
    token_uses = list(map(s.meter.measure, rollouts, verdicts))
    responses = share_facts(rollouts, verdicts, token_uses, problems)
    outcomes = ((problems[r.problem_index].id, r.outcome) for r in responses)
    if s.verifier.always_fails(outcomes, len(problems)):
        reasons = gather_from_all([s.verifier.first_failure])
        raise s.verifier.refusal(next(filter(None, reasons)))
    return JudgedProblems(
        problems=problems,
        rollouts=rollouts,
        verdicts=verdicts,
        token_uses=token_uses,
        responses=responses,
    )
