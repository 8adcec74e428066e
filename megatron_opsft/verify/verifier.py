"""Verdicts for rollouts: what the training loop calls."""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from megatron_opsft.config import VerifyConfig
from megatron_opsft.config_section import SHIPPED_JUDGES
from megatron_opsft.data.rows import ABSENT, find_field
from megatron_opsft.errors import UserError
from megatron_opsft.records import FinishReason, Outcome, Problem, Rollout, Verdict
from megatron_opsft.verify.cores import share_of_cores
from megatron_opsft.verify.worker_pool import VerifierPool

log = logging.getLogger("megatron_opsft")


class Verifier:
    """Scores rollouts with a pool of worker processes; close it, or use it in a `with`."""

    def __init__(self, config: VerifyConfig, num_local_ranks: int = 1) -> None:
        num_workers = config.workers or share_of_cores(num_local_ranks)
        names = _judges_of_rows(config) if config.judge_field is not None else [config.judge]
        self._pool = VerifierPool(num_workers, config.timeout_seconds, judge=",".join(names))
        self._config = config
        self._says_error = names != ["math"]  # to the others an error is a mistake in code or data

    def score(self, rollouts: Sequence[Rollout], problems: Mapping[str, Problem]) -> list[Verdict]:
        """One verdict for each rollout, in order; `problems` by the rollouts' problem ids.

        A response that ended by the length limit is UNFINISHED: it is rejected whatever it says,
        so it costs no verification. Each rank scores its own rollouts.
        """
        finished = [r for r in rollouts if r.finish_reason is FinishReason.STOP]
        verdicts = self._pool.score([self._item(r.text, problems[r.problem_id]) for r in finished])
        if self._says_error:
            self._say_first_error(verdicts)
        scored = iter(verdicts)
        return [
            next(scored)
            if rollout.finish_reason is FinishReason.STOP
            else Verdict(outcome=Outcome.UNFINISHED)
            for rollout in rollouts
        ]

    def _item(self, text: str, problem: Problem) -> tuple[str, ...]:
        """What the judges of the settings take."""
        if not self._config.needs_fields:
            return (text, problem.answer)
        item = (text, problem.answer, json.dumps(problem.fields))
        if self._config.judge_field is None:
            return item
        return (*item, _judge_of_row(self._config, problem))

    def _say_first_error(self, verdicts: Sequence[Verdict]) -> None:
        errors = [v.answer for v in verdicts if v.outcome is Outcome.ERROR and v.answer]
        if errors:
            self._says_error = False
            log.warning(
                "judge %s: %d of %d responses could not be judged, which makes them errors; the "
                "first: %s",
                *(self._config.judge, len(errors), len(verdicts), errors[0]),
            )

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


def check_judge(config: VerifyConfig) -> None:
    """Errors: `UserError` for a function of the user's that cannot be imported. It is tried in a
    worker process, not in this one.
    """
    if config.own_judge:
        with VerifierPool(1, config.timeout_seconds, judge=config.judge) as pool:
            pool.wait_until_ready()


def check_row_judges(config: VerifyConfig, problems: Iterable[Problem]) -> None:
    """Errors: `UserError` for a row that names a judge which it cannot have, and where no row names
    one. Nothing is looked at where `judge_field` is not set.
    """
    if config.judge_field is None:
        return
    names, any_named = _judges_of_rows(config), False
    for problem in problems:
        any_named |= find_field(problem.fields, config.judge_field) is not ABSENT
        if (name := _judge_of_row(config, problem)) not in names:
            raise UserError(
                f"judge_field={config.judge_field}: problem {problem.id} has {name!r} there; a row "
                f"can name {', '.join(names)} (of your own functions, only the one in judge=...)"
            )
    if not any_named:
        raise UserError(
            f"judge_field={config.judge_field}: no row has that field; name another, or leave it "
            "out"
        )


def _judges_of_rows(config: VerifyConfig) -> list[str]:
    """Data may choose among these; it cannot name code to be run."""
    return list(dict.fromkeys((config.judge, *SHIPPED_JUDGES)))


def _judge_of_row(config: VerifyConfig, problem: Problem) -> str:
    named = find_field(problem.fields, config.judge_field or "")
    return config.judge if named is ABSENT or not named else str(named)
