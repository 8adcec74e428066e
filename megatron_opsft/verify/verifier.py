"""Verdicts for rollouts: what the training loop calls."""

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

from megatron_opsft.config import VerifyConfig
from megatron_opsft.config_section import SHIPPED_JUDGES
from megatron_opsft.data.rows import ABSENT, find_field
from megatron_opsft.errors import UserError
from megatron_opsft.records import FinishReason, Outcome, Problem, Rollout, Verdict
from megatron_opsft.verify.worker_pool import VerifierPool

log = logging.getLogger("megatron_opsft")

MAX_WORKERS = 32  # of a rank that is not told how many


class Verifier:
    """Scores rollouts with a pool of worker processes; close it, or use it in a `with`."""

    def __init__(self, config: VerifyConfig, num_local_ranks: int = 1) -> None:
        num_workers = config.workers or share_of_cores(num_local_ranks)
        names = [config.judge] if config.judge_field is None else _judges_of_rows(config)
        self._pool = VerifierPool(num_workers, config.timeout_seconds, judge=",".join(names))
        self._config = config
        self._says_error = names != ["math"]  # to the others an error is a mistake in code or data

    def score(self, rollouts: Sequence[Rollout], problems: Mapping[str, Problem]) -> list[Verdict]:
        """One verdict for each rollout, in order; `problems` by the rollouts' problem ids.

        A response that ended by the length limit is UNFINISHED: it is rejected whatever it says,
        so it costs no verification. Each rank scores its own rollouts.
        """
        finished = [r.finish_reason is FinishReason.STOP for r in rollouts]
        items = []
        for rollout, is_finished in zip(rollouts, finished, strict=True):
            if is_finished:
                problem = problems[rollout.problem_id]
                name = _judge_of_row(self._config, problem)
                items.append((rollout.text, problem.answer, json.dumps(problem.fields), name))
        verdicts = self._pool.score(items)
        self._say_first_error(verdicts)
        scored = iter(verdicts)
        unfinished = Verdict(outcome=Outcome.UNFINISHED)
        return [next(scored) if is_finished else unfinished for is_finished in finished]

    def _say_first_error(self, verdicts: Sequence[Verdict]) -> None:
        errors = [v.answer for v in verdicts if v.outcome is Outcome.ERROR and v.answer]
        if errors and self._says_error:
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

    def __exit__(self, *_: object) -> None:
        self.close()


def share_of_cores(num_local_ranks: int) -> int:
    """Workers of a rank when `verify.workers` is 0: its share of the usable CPU cores.

    The ranks of a node share what this process may use, but where SLURM bound each task to cores of
    its own. A task that is bound has SLURM_CPUS_PER_TASK of them, and perhaps the sibling of an odd
    one; one that is not has those of all tasks. Ranks that torchrun started share its task's.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    usable = len(affinity(0)) if affinity else os.cpu_count() or 1
    per_task = os.environ.get("SLURM_CPUS_PER_TASK", "")
    by_slurm = per_task.isdecimal() and "TORCHELASTIC_RUN_ID" not in os.environ
    if by_slurm and usable < 2 * int(per_task):
        num_local_ranks = 1
    return max(1, min(MAX_WORKERS, usable // num_local_ranks))


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
    named = config.judge_field and find_field(problem.fields, config.judge_field)
    return str(named) if named and named is not ABSENT else config.judge
