"""How a study makes a run: data if its method needs them, training, evaluation, each a command.

Commands are forked from one process that has imported the libraries once, or started by the user's
launcher. Nothing is made twice: each command continues what it began.
"""

import logging
import multiprocessing
import os
import runpy
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection
from pathlib import Path
from typing import Any

from megatron_opsft.commands.evaluate.settings import EvalSettings
from megatron_opsft.commands.launch.rounds import RoundsPlan, check_rounds
from megatron_opsft.commands.study.study_file import StudyRun
from megatron_opsft.config.load import load
from megatron_opsft.config.run_prompt import SECTIONS
from megatron_opsft.errors import UserError
from megatron_opsft.runtime.owned_directory import OwnedDirectory, flatten
from megatron_opsft.runtime.phase import REQUEUE_EXIT_CODE, StopSignal

log = logging.getLogger("megatron_opsft")

_FORKS = multiprocessing.get_context("forkserver")
_LIBRARIES = [
    "megatron_opsft.commands.cli",
    "megatron_opsft.run.train",
    "megatron_opsft.commands.evaluate.run",
]
_SECONDS_BETWEEN_LOOKS = 0.1


class RunDirectory(OwnedDirectory):
    """The directory of a run; its manifest is the definition that the run was made with."""

    kind = "study's run"
    names = ()
    manifest = "definition.json"
    fix = "set it back, delete that directory, or name another --out"


def check_run(run: StudyRun) -> None:
    """Errors: `UserError` for wrong settings, or others than those the run was made with."""
    try:
        commands_of(run)
        RunDirectory(run.directory).check_same(run.definition())
    except UserError as error:
        raise UserError(f"run {run.name!r}: {error}") from None


def _rounds(run: StudyRun) -> RoundsPlan | None:
    """None for a method that samples while it trains. Errors: `UserError`."""
    config = run.load()
    if not config.method.has_fixed_data:
        if run.rounds > 1:
            check_rounds(config)
        return None
    if config.run.steps % run.rounds:
        raise UserError(
            f"rounds={run.rounds} does not divide run.steps={config.run.steps}; choose a divisor"
        )
    return RoundsPlan(
        config=config,
        words=run.words,
        count=run.rounds,
        problems=run.data_problems,
        steps=config.run.steps // run.rounds,
    )


def trainings_of(run: StudyRun) -> list[Path]:
    """Directories of the trainings that follow each other in a run. Errors: `UserError`."""
    if not run.trains:
        return []
    if rounds := _rounds(run):
        return [rounds.run_dir(number) for number in range(1, rounds.count + 1)]
    return [run.directory / "train"]


def commands_of(run: StudyRun) -> list[list[str]]:
    """The commands that a run still needs, without `megatron-opsft`. Errors: `UserError`."""
    commands: list[list[str]] = []
    if run.trains and (rounds := _rounds(run)):
        commands = list(rounds.remaining_commands())
    elif run.trains:
        commands = [["train", *run.words, "--resume=auto"]]
    own: dict[str, Any] = {"name": run.label, "out": str(run.evaluation)}
    asked = {}  # a model that is trained is asked as in its training
    if run.trains:
        own["model"] = str(trainings_of(run)[-1])
    else:
        config = run.load()
        own["model"] = config.model.path
        asked = {
            key: getattr(getattr(config, section), key)
            for key, section in SECTIONS.items()
        }
    words = [
        f"{key}={value}"
        for key, value in flatten(asked | run.eval_settings | own).items()
    ]
    load(EvalSettings, None, words)
    return [*commands, ["eval", *words]]


def make_runs(runs: Sequence[StudyRun], launcher: str, at_once: int) -> None:
    """Make these runs, `at_once` at a time. launcher: what replaces `megatron-opsft`, such as
    `torchrun --nproc-per-node 8 -m megatron_opsft`; "": processes of one rank each.

    A failed run does not stop the others. A stop signal is passed on to the commands, and no
    further run begins.
    """
    if not launcher:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault(
            "PYTHONWARNINGS", "ignore"
        )  # as the commands do themselves
        _FORKS.set_forkserver_preload(_LIBRARIES)
    stop = StopSignal(0)
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda run: _make(run, shlex.split(launcher), stop), runs))


def _make(run: StudyRun, launcher: Sequence[str], stop: StopSignal) -> None:
    if stop.requested:
        return
    run.directory.mkdir(parents=True, exist_ok=True)
    RunDirectory(run.directory).write_manifest({"identity": run.definition()})
    started = time.monotonic()
    for words in commands_of(run):
        code = REQUEUE_EXIT_CODE
        while code == REQUEUE_EXIT_CODE and not stop.requested:
            code = _call(words, launcher, run.log, stop)
        if stop.requested:
            return
        if code:
            log.warning(
                "%s: `%s` ended with %d, see %s", run.label, words[0], code, run.log
            )
            return
    log.info("%s: done in %.0f s", run.label, time.monotonic() - started)


def _call(
    words: list[str], launcher: Sequence[str], output: Path, stop: StopSignal
) -> int:
    """Run `megatron-opsft *words` and append its output to `output`; its exit code, which is not 0
    if a signal ended it. A requested stop becomes a SIGTERM.
    """
    if launcher:
        with output.open("ab") as file:
            started = subprocess.Popen(
                [*launcher, *words], stdout=file, stderr=subprocess.STDOUT
            )
        terminate, poll = started.terminate, started.poll
    else:
        forked = _FORKS.Process(target=_command, args=(words, output))
        forked.start()
        terminate, poll = forked.terminate, lambda: forked.exitcode
    told = False
    while (code := poll()) is None:
        if stop.requested and not told:
            terminate()
            told = True
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return code


def _command(words: list[str], output: Path) -> None:
    """What the forked process does; it does not outlive the process that started it."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with output.open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    sys.argv = ["megatron-opsft", *words]
    runpy.run_module("megatron_opsft", run_name="__main__")


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
