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
class EvalResult:
    """Measurements over the responses of all ranks."""

    values: dict[str, float | int]
    """Values of evals.jsonl by key, without the prefix `eval_`: accuracy, in [0, 1];
    mean_response_tokens, end tokens included; truncated_share, the share of responses that the
    limit cut off; samples, the number of responses.
    """
    correct_lengths: list[int]
    """Tokens of each correct response, end token included."""
    shown: list[tuple[Problem, Rollout, Verdict]]
    """A few responses for people to read."""


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
        """Sample and judge the held-out problems. Called by every rank; all get the same result.

        encode: makes the prompt of a problem, see `Sampler.sample`.
        num_shown: the first response to each of so many problems is in the result.
        Errors: `UserError` if there is no problem.
        """
        rollouts = sampler.sample(
            self.problems,
            self.settings,
            num_samples=self.samples_per_problem,
            step=EVAL_STEP,
            encode=encode,
        )
        verdicts = verifier.score(
            rollouts, {problem.id: problem for problem in self.problems}
        )
        shown_ids = {problem.id for problem in self.problems[:num_shown]}
        num_tokens = num_cut_off = 0
        correct_lengths: list[int] = []
        first_responses: list[tuple[Rollout, Verdict]] = []
        for rollout, verdict in zip(rollouts, verdicts, strict=True):
            num_tokens += len(rollout.response_ids)
            if rollout.finish_reason is FinishReason.LENGTH:
                num_cut_off += 1
            if verdict.outcome is Outcome.CORRECT:
                correct_lengths.append(len(rollout.response_ids))
            if rollout.sample_index == 0 and rollout.problem_id in shown_ids:
                first_responses.append((rollout, verdict))
        all_correct_lengths = gather_from_all(correct_lengths)
        total_tokens, total_cut_off, num_samples = sum_over_world(
            [num_tokens, num_cut_off, len(rollouts)]
        )
        if not num_samples:
            raise UserError("eval.data: there is no held-out problem to evaluate on")
        responses_by_problem = {
            rollout.problem_id: (rollout, verdict)
            for rollout, verdict in gather_from_all(first_responses)
        }
        return EvalResult(
            values={
                "accuracy": len(all_correct_lengths) / num_samples,
                "mean_response_tokens": total_tokens / num_samples,
                "truncated_share": total_cut_off / num_samples,
                "samples": int(num_samples),
            },
            correct_lengths=all_correct_lengths,
            shown=[
                (problem, *responses_by_problem[problem.id])
                for problem in self.problems[:num_shown]
                if problem.id in responses_by_problem
            ],
        )
