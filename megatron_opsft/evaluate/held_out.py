"""Accuracy and length on held-out problems during a run, by sampling (never greedy)."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_opsft.errors import UserError
from megatron_opsft.records import Outcome, Problem
from megatron_opsft.rollout.engine import SamplingSettings
from megatron_opsft.rollout.sample import Sampler
from megatron_opsft.rollout.sampling import EVAL_STEP
from megatron_opsft.runtime.distributed import sum_over_world
from megatron_opsft.verify.verifier import Verifier


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """accuracy: share of correct responses in [0, 1]; mean_response_tokens: end tokens included."""

    accuracy: float
    mean_response_tokens: float
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The held-out problems and how they are sampled; the same seeds at every call."""

    problems: Sequence[Problem]
    settings: SamplingSettings
    samples_per_problem: int

    def evaluate(self, sampler: Sampler, verifier: Verifier) -> EvalResult:
        """Collective over all ranks; every rank gets the result."""
        rollouts = sampler.sample(
            self.problems, self.settings, num_samples=self.samples_per_problem, step=EVAL_STEP
        )
        gold = {problem.id: problem.answer for problem in self.problems}
        verdicts = verifier.score(rollouts, gold)
        correct = sum(verdict.outcome is Outcome.CORRECT for verdict in verdicts)
        tokens = sum(len(rollout.response_ids) for rollout in rollouts)
        sums = sum_over_world([float(correct), float(tokens), float(len(rollouts))])
        if not sums[2]:
            raise UserError("eval.data: there is no held-out problem to evaluate on")
        return EvalResult(
            accuracy=sums[0] / sums[2],
            mean_response_tokens=sums[1] / sums[2],
            num_samples=int(sums[2]),
        )
