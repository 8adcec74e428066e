"""Accuracy and length on held-out problems during a run, by sampling."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_opsft.errors import UserError
from megatron_opsft.records import FinishReason, Outcome, Problem, Rollout, Verdict
from megatron_opsft.rollout.engine import SamplingSettings
from megatron_opsft.rollout.sample import Sampler
from megatron_opsft.rollout.sampling import EVAL_STEP
from megatron_opsft.runtime.distributed import gather_from_all, sum_over_world
from megatron_opsft.verify.verifier import Verifier


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownResponse:
    """A response for people to read."""

    problem: str
    gold: str
    response: str
    num_tokens: int
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """accuracy, truncated_share (cut off by the limit): of all responses, in [0, 1];
    mean_response_tokens: end tokens included; correct_lengths: tokens of each correct response.
    """

    accuracy: float
    mean_response_tokens: float
    truncated_share: float
    num_samples: int
    correct_lengths: tuple[int, ...]
    shown: tuple[ShownResponse, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The held-out problems and how they are sampled; the same seeds at every call."""

    problems: Sequence[Problem]
    settings: SamplingSettings
    samples_per_problem: int

    def evaluate(
        self,
        sampler: Sampler,
        verifier: Verifier,
        encode: Callable[[Problem], tuple[int, ...]] | None = None,
        *,
        num_shown: int = 0,
    ) -> EvalResult:
        """Collective over all ranks; every rank gets the result. encode: as in `Sampler.sample`.
        num_shown: of how many problems the first response is shown.
        """
        rollouts = sampler.sample(
            self.problems,
            self.settings,
            num_samples=self.samples_per_problem,
            step=EVAL_STEP,
            encode=encode,
        )
        verdicts = verifier.score(rollouts, {problem.id: problem for problem in self.problems})
        mine = [
            len(rollout.response_ids)
            for rollout, verdict in zip(rollouts, verdicts, strict=True)
            if verdict.outcome is Outcome.CORRECT
        ]
        correct_lengths = gather_from_all(mine)
        tokens = sum(len(rollout.response_ids) for rollout in rollouts)
        cut_off = sum(rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts)
        sampled_tokens, num_cut_off, num_samples = sum_over_world([tokens, cut_off, len(rollouts)])
        if not num_samples:
            raise UserError("eval.data: there is no held-out problem to evaluate on")
        return EvalResult(
            accuracy=len(correct_lengths) / num_samples,
            mean_response_tokens=sampled_tokens / num_samples,
            truncated_share=num_cut_off / num_samples,
            num_samples=int(num_samples),
            correct_lengths=tuple(correct_lengths),
            shown=self._shown(rollouts, verdicts, num_shown),
        )

    def _shown(
        self, rollouts: Sequence[Rollout], verdicts: Sequence[Verdict], number: int
    ) -> tuple[ShownResponse, ...]:
        """The first response to each of the first problems, from whichever rank has it."""
        problems = {problem.id: problem for problem in self.problems[:number]}
        mine = {
            rollout.problem_id: ShownResponse(
                problem=problems[rollout.problem_id].text,
                gold=problems[rollout.problem_id].answer,
                response=rollout.text,
                num_tokens=len(rollout.response_ids),
                outcome=verdict.outcome.value,
            )
            for rollout, verdict in zip(rollouts, verdicts, strict=True)
            if rollout.sample_index == 0 and rollout.problem_id in problems
        }
        found = dict(gather_from_all(list(mine.items())))
        return tuple(found[key] for key in problems if key in found)
