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
    """Values of evals.jsonl. Their keys end with accuracy, in [0, 1]; mean_response_tokens, end
    tokens included; truncated_share, the share of responses that the limit cut off; samples, the
    number of responses.
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
        encode: Callable[[Problem], tuple[int, ...]],
        *,
        key: str,
        num_shown: int,
    ) -> EvalResult:
        """Sample and judge the held-out problems. Called by every rank; all get the same result.

        encode: makes the prompt of a problem. key: the prefix of the keys in evals.jsonl.
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
        problems = {problem.id: problem for problem in self.problems}
        verdicts = verifier.score(rollouts, problems)
        judged = list(zip(rollouts, verdicts, strict=True))
        correct_lengths = gather_from_all(
            [len(r.response_ids) for r, v in judged if v.outcome is Outcome.CORRECT]
        )
        cut_off = [r for r in rollouts if r.finish_reason is FinishReason.LENGTH]
        tokens = sum(len(rollout.response_ids) for rollout in rollouts)
        num_tokens, num_cut_off, num_samples = sum_over_world(
            [tokens, len(cut_off), len(rollouts)]
        )
        if not num_samples:
            raise UserError("eval.data: there is no held-out problem to evaluate on")
        shown_ids = [problem.id for problem in self.problems[:num_shown]]
        first_responses = [
            (rollout, verdict)
            for rollout, verdict in judged
            if rollout.sample_index == 0 and rollout.problem_id in shown_ids
        ]
        shown = [
            (problems[rollout.problem_id], rollout, verdict)
            for rollout, verdict in gather_from_all(first_responses)
        ]
        shown.sort(key=lambda row: shown_ids.index(row[0].id))
        return EvalResult(
            values={
                f"{key}_accuracy": len(correct_lengths) / num_samples,
                f"{key}_mean_response_tokens": num_tokens / num_samples,
                f"{key}_truncated_share": num_cut_off / num_samples,
                f"{key}_samples": int(num_samples),
            },
            correct_lengths=correct_lengths,
            shown=shown,
        )
