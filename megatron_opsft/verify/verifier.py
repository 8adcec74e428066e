"""Verdicts for rollouts: what the training loop calls."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from megatron_opsft.config import VerifyConfig
from megatron_opsft.records import FinishReason, Outcome, Rollout, Verdict
from megatron_opsft.verify.worker_pool import VerifierPool, share_of_cores


class Verifier:
    """Scores rollouts with a pool of worker processes; close it, or use it in a `with`."""

    def __init__(self, config: VerifyConfig, num_local_ranks: int = 1) -> None:
        num_workers = config.workers or share_of_cores(num_local_ranks)
        self._pool = VerifierPool(num_workers, config.timeout_seconds)

    def score(self, rollouts: Sequence[Rollout], gold: Mapping[str, str]) -> list[Verdict]:
        """One verdict for each rollout, in order; `gold` maps problem id to gold answer.

        A response that ended by the length limit is UNFINISHED: it is rejected whatever it says,
        so it costs no verification. Each rank scores its own rollouts.
        """
        finished = [r for r in rollouts if r.finish_reason is FinishReason.STOP]
        scored = iter(self._pool.score([(r.text, gold[r.problem_id]) for r in finished]))
        return [
            next(scored)
            if rollout.finish_reason is FinishReason.STOP
            else Verdict(outcome=Outcome.UNFINISHED)
            for rollout in rollouts
        ]

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
