"""Verdicts for rollouts: what the training loop calls."""

import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from megatron_opsft.config import VerifyConfig
from megatron_opsft.records import FinishReason, Outcome, Problem, Rollout, Verdict
from megatron_opsft.verify.worker_pool import VerifierPool

log = logging.getLogger("megatron_opsft")

MAX_WORKERS = 32  # of a rank that is not told how many
# What decides a verdict of the shipped judges.
_RULES = (*("answer", "comparison", "equality", "math_verifier", "reading", "spelling", "units"),)


class Verifier:
    """Scores rollouts with a pool of worker processes; close it, or use it in a `with`."""

    def __init__(self, config: VerifyConfig, num_local_ranks: int = 1) -> None:
        num_workers = config.workers or share_of_cores(num_local_ranks)
        self._pool = VerifierPool(num_workers, config.timeout_seconds, judge=config.judge)
        self._judge = config.judge
        self._says_error = config.judge != "math"  # to the others it is a mistake in code or data

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
                items.append((rollout.text, problem.answer, json.dumps(problem.fields)))
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
                "judge %s: %d of %d responses could not be judged and count as errors; "
                "the first: %s",
                *(self._judge, len(errors), len(verdicts), errors[0]),
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


def describe_judge(config: VerifyConfig, math: str) -> str:
    """math: the version of math-verify. Of the rules in front of it, and of a user's function, a
    hash of the files is part: another code, another judge.
    """
    if not config.own_judge:
        rules = _hash(Path(__file__).with_name(f"{name}.py") for name in _RULES)
        return f"{math if config.judge == 'math' else config.judge}, rules {rules}"
    file = _find_file(config.judge.partition(":")[0])
    return f"{config.judge}, sha256 {_hash([file])}" if file else config.judge


def _hash(files: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _find_file(module: str) -> Path | None:
    """The file of a module, which is not imported; None where it has none."""
    paths = [Path(place, *module.split(".")) for place in (*sys.path, os.getcwd())]
    files = [file for path in paths for file in (path / "__init__.py", path.with_suffix(".py"))]
    return next(filter(Path.is_file, files), None)
