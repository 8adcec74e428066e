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
    """values: of all responses, as evals.jsonl has them behind `eval_`: accuracy, in [0, 1];
    mean_response_tokens, end tokens included; truncated_share, cut off by the limit; samples.
    correct_lengths: tokens of each correct response. shown: some for people to read.
    """

    values: dict[str, float | int]
    correct_lengths: list[int]
    shown: list[tuple[Problem, Rollout, Verdict]]


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
        verdicts = verifier.score(
            rollouts, {problem.id: problem for problem in self.problems}
        )
        judged = list(zip(rollouts, verdicts, strict=True))
        correct = [
            len(r.response_ids) for r, v in judged if v.outcome is Outcome.CORRECT
        ]
        correct_lengths = gather_from_all(correct)
        tokens = sum(len(rollout.response_ids) for rollout in rollouts)
        cut_off = sum(
            rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts
        )
        sampled_tokens, num_cut_off, num_samples = sum_over_world(
            [tokens, cut_off, len(rollouts)]
        )
        if not num_samples:
            raise UserError("eval.data: there is no held-out problem to evaluate on")
        shown = {problem.id: problem for problem in self.problems[:num_shown]}
        first = [(r.problem_id, (r, v)) for r, v in judged if not r.sample_index]
        found = dict(gather_from_all([one for one in first if one[0] in shown]))
        return EvalResult(
            values={
                "accuracy": len(correct_lengths) / num_samples,
                "mean_response_tokens": sampled_tokens / num_samples,
                "truncated_share": num_cut_off / num_samples,
                "samples": int(num_samples),
            },
            correct_lengths=correct_lengths,
            shown=[
                (problem, *found[key]) for key, problem in shown.items() if key in found
            ],
        )
