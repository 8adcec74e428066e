"""Verdicts for rollouts, for the training loop and evaluations."""

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_opsft.config import VerifyConfig
from megatron_opsft.errors import log
from megatron_opsft.records import FinishReason, Outcome, Problem, Rollout, Verdict
from megatron_opsft.verify.handed_judge import is_handed
from megatron_opsft.verify.worker_pool import VerifierPool

MAX_WORKERS = 32  # of a rank, if verify.workers does not set them
# Files that run the judge of mathematics, or look at responses beside it: they hold no rules.
_NO_RULES = {
    "doubts.py",
    "handed_judge.py",
    "overthinking.py",
    "right_answers.py",
    "statements.py",
    "verifier.py",
    "worker.py",
    "worker_pool.py",
}


class JudgeKeys(NamedTuple):
    """The config keys of a judge, for messages."""

    timeout: str
    memory: str


RUN_KEYS = JudgeKeys(timeout="verify.timeout_seconds", memory="verify.memory_gb")


class Verifier(VerifierPool):
    """A pool of workers that scores rollouts; close it, or use it in a `with`."""

    def __init__(self, config: VerifyConfig, keys: JudgeKeys = RUN_KEYS) -> None:
        super().__init__(
            config.workers or share_of_cores(),
            config.timeout_seconds,
            judge=config.judge,
            max_memory_bytes=int(config.memory_gb * 2**30),
            memory_key=keys.memory,
        )
        self._config = config
        self._keys = keys
        # An error of a user's own judge is a mistake in code or data: the first is logged.
        self._logs_error = config.own_judge

    def score(
        self, rollouts: Sequence[Rollout], problems: Mapping[str, Problem]
    ) -> list[Verdict]:
        """Return one verdict for each rollout, in order; `problems` by their ids.

        A response that ended by the length limit is UNFINISHED: it is rejected whatever it says,
        so it costs no verification. Each rank scores its own rollouts.
        """
        items = {}
        for index, rollout in enumerate(rollouts):
            if rollout.finish_reason is FinishReason.STOP:
                problem = problems[rollout.problem_id]
                items[index] = rollout.text, problem.answer, json.dumps(problem.fields)
        scored = self.judge(list(items.values()))
        self._log_first_error(scored)
        verdicts = [Verdict(outcome=Outcome.UNFINISHED)] * len(rollouts)
        for index, verdict in zip(items, scored, strict=True):
            verdicts[index] = verdict
        return verdicts

    def _log_first_error(self, verdicts: Sequence[Verdict]) -> None:
        """Log, once for this verifier, that a user's own judge could not judge some responses."""
        failures = (Outcome.ERROR, Outcome.TIMEOUT)
        failed = [verdict for verdict in verdicts if verdict.outcome in failures]
        if failed and self._logs_error:
            self._logs_error = False
            log.warning(
                "judge %s: %d of %d responses could not be judged and count as errors; "
                "the first: %s",
                self._config.judge,
                len(failed),
                len(verdicts),
                self._explain(failed[0]),
            )

    def _explain(self, failed: Verdict) -> str:
        """Return why the judge gave no verdict, and which key may help."""
        config, keys = self._config, self._keys
        if failed.outcome is Outcome.TIMEOUT:
            return f"it took longer than {keys.timeout}={config.timeout_seconds:g}; raise that"
        return failed.answer or (
            "its process ended without a verdict; if it needs more than "
            f"{keys.memory}={config.memory_gb:g}, raise that"
        )


def share_of_cores() -> int:
    """Return how many workers a rank has when `verify.workers` is 0: its share of the CPU cores.

    A rank that is a task of SLURM has all cores of its task. Ranks that torchrun started see the
    same cores, and share them.
    """
    usable = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # Linux
        usable = len(os.sched_getaffinity(0))
    share = usable // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    per_task = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if per_task.isdecimal() and "TORCHELASTIC_RUN_ID" not in os.environ:
        share = int(per_task)
    return max(1, min(MAX_WORKERS, share))


def check_judge(config: VerifyConfig, keys: JudgeKeys = RUN_KEYS) -> None:
    """Check that a judge of the user's own can be imported, by starting one worker process.

    Errors: `UserError` if it cannot, or if it needs more memory than it may have.
    """
    if config.own_judge:
        with Verifier(config.model_copy(update={"workers": 1}), keys) as verifier:
            verifier.wait_until_ready()


def describe_judge(config: VerifyConfig, math: str) -> str:
    """Return the judge's name with a hash of its code: evaluations by different code differ.

    math: the version of math-verify.
    """
    if is_handed(config.judge):
        return config.judge
    if not config.own_judge:
        files = sorted(Path(__file__).parent.glob("*.py"))
        return f"{math}, rules {_hash(f for f in files if f.name not in _NO_RULES)}"
    file = _find_file(config.judge.partition(":")[0])
    return f"{config.judge}, sha256 {_hash([file])}" if file else config.judge


def _hash(files: Iterable[Path]) -> str:
    """Return the first 16 digits of the SHA-256 of all files' content together."""
    content = b"".join(file.read_bytes() for file in files)
    return hashlib.sha256(content).hexdigest()[:16]


def _find_file(module: str) -> Path | None:
    """Find the file of a module without importing it; None if it has none."""
    for directory in (*sys.path, os.getcwd()):
        path = Path(directory, *module.split("."))
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return file
    return None
