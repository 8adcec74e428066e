"""Verdicts for rollouts, for the training loop and evaluations."""

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_opsft.config import VerifyConfig
from megatron_opsft.errors import UserError, log
from megatron_opsft.records import FinishReason, Outcome, Problem, Rollout, Verdict
from megatron_opsft.verify.handed_judge import is_handed
from megatron_opsft.verify.worker import file_of_judge
from megatron_opsft.verify.worker_pool import VerifierPool

MAX_WORKERS = 32  # of a rank, if verify.workers does not set them
# A judge that fails at every response to so many problems fails at all of them.
ENOUGH_PROBLEMS = 8
# The outcomes without a verdict: they say nothing about a response.
FAILURES = (Outcome.ERROR, Outcome.TIMEOUT)
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

    has_judged: bool
    """True as soon as it is known to have given a verdict that is no failure."""
    first_failure: str
    """Why it could not judge a response of this rank, the first one; "" if there is none."""

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
        self.has_judged = False
        self.first_failure = ""
        self._failed_problems: set[str] = set()

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
        self._note_first_failure(scored)
        verdicts = [Verdict(outcome=Outcome.UNFINISHED)] * len(rollouts)
        for index, verdict in zip(items, scored, strict=True):
            verdicts[index] = verdict
        return verdicts

    def always_fails(
        self, outcomes: Iterable[tuple[str, Outcome]], num_problems: int
    ) -> bool:
        """Count responses, and return True if the judge has failed at every one that it was given
        until now, and these answer enough problems: `ENOUGH_PROBLEMS`, or all.

        outcomes: (problem id, outcome) of more responses. num_problems: of how many problems.
        """
        if self.has_judged:
            return False
        for problem_id, outcome in outcomes:
            if outcome in FAILURES:
                self._failed_problems.add(problem_id)
            elif outcome is not Outcome.UNFINISHED:
                self.has_judged = True
        enough = min(ENOUGH_PROBLEMS, num_problems)
        return not self.has_judged and len(self._failed_problems) >= enough > 0

    def refusal(self, first_failure: str) -> UserError:
        """Return the error for a judge that always fails. first_failure: of any rank."""
        return UserError(
            f"judge {self._config.judge}: none of the responses to {len(self._failed_problems)} "
            f"problems could be judged; the first: {first_failure}. Nothing was learned from them "
            "or stored: mend it, then start again"
        )

    def _note_first_failure(self, verdicts: Sequence[Verdict]) -> None:
        """Note why a response could not be judged; of a user's own judge log it, once for this
        verifier.
        """
        failed = [verdict for verdict in verdicts if verdict.outcome in FAILURES]
        if failed and not self.first_failure:
            self.first_failure = self.explain(failed[0])
        if failed and self._logs_error:
            self._logs_error = False
            log.warning(
                "judge %s: %d of %d responses could not be judged and count as errors; "
                "the first: %s",
                self._config.judge,
                len(failed),
                len(verdicts),
                self.first_failure,
            )

    def explain(self, failed: Verdict) -> str:
        """Return why the judge gave no verdict, and which key may help."""
        if failed.outcome is Outcome.TIMEOUT:
            limit = f"{self._keys.timeout}={self._config.timeout_seconds:g}"
            return f"it took longer than {limit}; raise that"
        return failed.answer


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


def judge_gold(config: VerifyConfig, problem: Problem) -> Verdict:
    """Return what the judge says of a response that is the problem's own answer in a box.

    Errors: `UserError` if it gives no verdict.
    """
    text = rf"\boxed{{{problem.answer}}}"
    with Verifier(config.model_copy(update={"workers": 1})) as verifier:
        (verdict,) = verifier.judge(
            [(text, problem.answer, json.dumps(problem.fields))]
        )
        if verdict.outcome in FAILURES:
            raise UserError(
                f"judge {config.judge}: it cannot judge {text}, the answer of problem "
                f"{problem.id}: {verifier.explain(verdict)}"
            )
    return verdict


def describe_judge(config: VerifyConfig, math: str) -> str:
    """Return the judge's name with a hash of its code: evaluations by different code differ.

    math: the version of math-verify.
    """
    if is_handed(config.judge):
        return config.judge
    if not config.own_judge:
        files = sorted(Path(__file__).parent.glob("*.py"))
        return f"{math}, rules {_hash(f for f in files if f.name not in _NO_RULES)}"
    module, _, function = config.judge.rpartition(":")
    file = file_of_judge(config.judge)
    name = f"{file.name}:{function}" if file else config.judge
    file = file or _find_file(module)
    return f"{name}, sha256 {_hash([file])}" if file else name


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
