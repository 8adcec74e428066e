"""Accuracy and length on held-out problems during a run, by sampling (never greedy)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_opsft.errors import UserError
from megatron_opsft.records import Outcome, Problem
from megatron_opsft.rollout.engine import SamplingSettings
from megatron_opsft.rollout.sample import Sampler
from megatron_opsft.rollout.sampling import EVAL_STEP
from megatron_opsft.runtime.distributed import gather_from_all, sum_over_world
from megatron_opsft.verify.verifier import Verifier


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """accuracy: share of correct responses in [0, 1]; mean_response_tokens: end tokens included.

    correct_lengths: tokens of each correct response.
    """

    accuracy: float
    mean_response_tokens: float
    num_samples: int
    correct_lengths: tuple[int, ...]


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
    ) -> EvalResult:
        """Collective over all ranks; every rank gets the result. encode: as in `Sampler.sample`."""
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
        sampled_tokens, num_samples = sum_over_world([float(tokens), float(len(rollouts))])
        if not num_samples:
            raise UserError("eval.data: there is no held-out problem to evaluate on")
        return EvalResult(
            accuracy=len(correct_lengths) / num_samples,
            mean_response_tokens=sampled_tokens / num_samples,
            num_samples=int(num_samples),
            correct_lengths=tuple(correct_lengths),
        )
