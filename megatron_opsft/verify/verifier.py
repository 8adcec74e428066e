"""Verdicts for rollouts: what the training loop calls."""

import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_opsft.config import VerifyConfig
from megatron_opsft.records import FinishReason, Outcome, Problem, Rollout, Verdict
from megatron_opsft.verify.worker_pool import VerifierPool

log = logging.getLogger("megatron_opsft")

MAX_WORKERS = 32  # of a rank that is not told how many
_NO_RULES = {
    "verifier.py",
    "worker.py",
    "worker_pool.py",
}  # run the judge of mathematics


class JudgeKeys(NamedTuple):
    """What messages call the keys of a judge."""

    timeout: str
    memory: str


RUN_KEYS = JudgeKeys(timeout="verify.timeout_seconds", memory="verify.memory_gb")


class Verifier(VerifierPool):
    """Scores rollouts; close it, or use it in a `with`."""

    def __init__(self, config: VerifyConfig, keys: JudgeKeys = RUN_KEYS) -> None:
        super().__init__(
            config.workers or share_of_cores(),
            config.timeout_seconds,
            judge=config.judge,
            max_memory_bytes=int(config.memory_gb * 2**30),
            memory_key=keys.memory,
        )
        self._config, self._keys = config, keys
        self._says_error = config.own_judge  # there it is a mistake in code or data

    def score(
        self, rollouts: Sequence[Rollout], problems: Mapping[str, Problem]
    ) -> list[Verdict]:
        """One verdict for each rollout, in order; `problems` by the rollouts' problem ids.

        A response that ended by the length limit is UNFINISHED: it is rejected whatever it says,
        so it costs no verification. Each rank scores its own rollouts.
        """
        items = {}
        for index, rollout in enumerate(rollouts):
            if rollout.finish_reason is FinishReason.STOP:
                problem = problems[rollout.problem_id]
                items[index] = rollout.text, problem.answer, json.dumps(problem.fields)
        scored = self.judge([*items.values()])
        self._say_first_error(scored)
        verdicts = dict(zip(items, scored, strict=True))
        unfinished = Verdict(outcome=Outcome.UNFINISHED)
        return [verdicts.get(index, unfinished) for index in range(len(rollouts))]

    def _say_first_error(self, verdicts: Sequence[Verdict]) -> None:
        failed = [v for v in verdicts if v.outcome in (Outcome.ERROR, Outcome.TIMEOUT)]
        if failed and self._says_error:
            self._says_error = False
            log.warning(
                "judge %s: %d of %d responses could not be judged and count as errors; "
                "the first: %s",
                *(self._judge, len(failed), len(verdicts), self._explain(failed[0])),
            )

    def _explain(self, failed: Verdict) -> str:
        config, keys = self._config, self._keys
        if failed.outcome is Outcome.TIMEOUT:
            return f"it took longer than {keys.timeout}={config.timeout_seconds:g}; raise that"
        return failed.answer or (
            "its process ended without a verdict; if it needs more than "
            f"{keys.memory}={config.memory_gb:g}, raise that"
        )


def share_of_cores() -> int:
    """Workers of a rank when `verify.workers` is 0: its share of the usable CPU cores.

    A rank that is a task of SLURM has its task's; ranks that torchrun started share what each of
    them may use.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    usable = len(affinity(0)) if affinity else os.cpu_count() or 1
    share = usable // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    per_task = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if per_task.isdecimal() and "TORCHELASTIC_RUN_ID" not in os.environ:
        share = int(per_task)
    return max(1, min(MAX_WORKERS, share))


def check_judge(config: VerifyConfig, keys: JudgeKeys = RUN_KEYS) -> None:
    """Errors: `UserError` for a function of the user's that cannot be imported, and for one that
    needs more memory than it may have. It is tried in a worker process, not in this one.
    """
    if config.own_judge:
        with Verifier(config.model_copy(update={"workers": 1}), keys) as verifier:
            verifier.wait_until_ready()


def describe_judge(config: VerifyConfig, math: str) -> str:
    """The judge's name with a hash of its code, so that evaluations by different code differ.

    math: the version of math-verify.
    """
    if not config.own_judge:
        rules = [
            f for f in Path(__file__).parent.glob("*.py") if f.name not in _NO_RULES
        ]
        return f"{math}, rules {_hash(sorted(rules))}"
    file = _find_file(config.judge.partition(":")[0])
    return f"{config.judge}, sha256 {_hash([file])}" if file else config.judge


def _hash(files: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[
        :16
    ]


def _find_file(module: str) -> Path | None:
    """The file of a module, which is not imported; None where it has none."""
    paths = [Path(place, *module.split(".")) for place in (*sys.path, os.getcwd())]
    files = [
        file
        for path in paths
        for file in (path / "__init__.py", path.with_suffix(".py"))
    ]
    return next(filter(Path.is_file, files), None)
