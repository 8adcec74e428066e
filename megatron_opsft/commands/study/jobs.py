"""Makes the runs of a study: data if the method needs them, training, evaluation, each a command.

Commands are forked from one process that has imported the libraries once, or started by the user's
launcher. Nothing is made twice: each command continues what it began.
"""

import json
import multiprocessing
import os
import runpy
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from megatron_opsft.commands.evaluate.settings import EvalSettings
from megatron_opsft.commands.launch.rounds import RoundsPlan, check_rounds, run_commands
from megatron_opsft.commands.study.study_file import Keys, StudyRun
from megatron_opsft.config.load import load
from megatron_opsft.config.run_prompt import SECTIONS
from megatron_opsft.errors import UserError, log
from megatron_opsft.runtime.owned_directory import OwnedDirectory, flatten
from megatron_opsft.runtime.phase import REQUEUE_EXIT_CODE, StopSignal
from megatron_opsft.section import section_class

_FORKS = multiprocessing.get_context("forkserver")
_LIBRARIES = [
    "megatron_opsft.commands.cli",
    "megatron_opsft.run.train",
    "megatron_opsft.commands.evaluate.run",
]
_POLL_SECONDS = 0.1


class RunDirectory(OwnedDirectory):
    """The directory of a run; its manifest holds the definition that the run was made with."""

    kind = "study's run"
    names = ()
    manifest = "definition.json"
    fix = "set it back, delete that directory, or name another --out"


def check_study_run(run: StudyRun) -> None:
    """Check the settings of a run.

    Errors: `UserError` for wrong settings, or others than those the run was made with.
    """
    try:
        commands_of(run)
        RunDirectory(run.directory).check_same(run.definition())
    except UserError as error:
        raise UserError(f"run {run.name!r}: {error}") from None


def _rounds(run: StudyRun) -> RoundsPlan | None:
    """Return the rounds of fixed data; None for a method that samples while it trains.

    Errors: `UserError`.
    """
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
    """Return the directories of a run's trainings, which follow each other. Errors: `UserError`."""
    if not run.trains:
        return []
    rounds = _rounds(run)
    if rounds is None:
        return [run.directory / "train"]
    return [rounds.run_dir(number) for number in range(1, rounds.count + 1)]


def commands_of(run: StudyRun) -> list[list[str]]:
    """Return the commands that a run still needs, without `megatron-opsft`. Errors: `UserError`."""
    commands = []
    prompt_and_judge = {}
    if run.trains:
        rounds = _rounds(run)
        commands = [["train", *run.words, "--resume=auto"]]
        if rounds is not None:
            commands = list(rounds.remaining_commands())
        model = str(trainings_of(run)[-1])  # `eval` has prompt and judge from there
    else:
        config = run.load()
        model = config.model.path
        tree = config.model_dump()
        prompt_and_judge = {key: tree[SECTIONS[key]][key] for key in SECTIONS}
    settings = {
        **prompt_and_judge,
        **run.eval_settings,
        "name": run.label,
        "out": str(run.evaluation),
        "model": model,
    }
    words = list(_words_of(settings))
    load(EvalSettings, None, words)  # checks them
    return [*commands, ["eval", *words]]


def _words_of(settings: Keys) -> Iterator[str]:
    """Yield the settings of an evaluation as key=value, those of a section one by one."""
    for key, value in settings.items():
        field = EvalSettings.model_fields.get(key)
        is_section = field is not None and section_class(field) is not None
        flat = {key: json.dumps(value, ensure_ascii=False)}
        if is_section and isinstance(value, dict):
            flat = flatten({key: value})
        for name, text in flat.items():
            yield f"{name}={text}"


def make_runs(runs: Sequence[StudyRun], launcher: str, at_once: int) -> None:
    """Make these runs, `at_once` at a time.

    launcher: what replaces `megatron-opsft`, such as `torchrun --nproc-per-node 8 -m
    megatron_opsft`; "": processes of one rank each. A failed run does not stop the others. A stop
    signal is passed on to the commands, and no further run begins.
    """
    if not launcher:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # The commands do so themselves.
        os.environ.setdefault("PYTHONWARNINGS", "ignore")
        _FORKS.set_forkserver_preload(_LIBRARIES)
    stop = StopSignal(0)
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda run: _make(run, shlex.split(launcher), stop), runs))


def _make(run: StudyRun, launcher: Sequence[str], stop: StopSignal) -> None:
    """Run the commands of a run one after another, up to the first that fails."""
    if stop.requested:
        return
    run.directory.mkdir(parents=True, exist_ok=True)
    RunDirectory(run.directory).write_manifest({"identity": run.definition()})
    start = time.monotonic()

    def call_until_done(words: Sequence[str]) -> int:
        """Call a command again as long as it stops with a checkpoint by itself."""
        exit_code = REQUEUE_EXIT_CODE
        while exit_code == REQUEUE_EXIT_CODE and not stop.requested:
            exit_code = _call(words, launcher, run.log, stop)
        return exit_code

    exit_code, words = run_commands(commands_of(run), call_until_done)
    if stop.requested:
        return
    if exit_code:
        log.warning(
            "%s: `%s` ended with %d, see %s", run.label, words[0], exit_code, run.log
        )
        return
    log.info("%s: done in %.0f s", run.label, time.monotonic() - start)


def _call(
    words: Sequence[str], launcher: Sequence[str], output: Path, stop: StopSignal
) -> int:
    """Run `megatron-opsft *words`, append its output to the file `output`, return its exit code.

    The exit code is not 0 if a signal ended the command. A requested stop is passed on as SIGTERM.
    """
    process: subprocess.Popen[bytes] | BaseProcess
    if launcher:
        with output.open("ab") as file:
            process = subprocess.Popen(
                [*launcher, *words], stdout=file, stderr=subprocess.STDOUT
            )
    else:
        process = _FORKS.Process(target=_run_command, args=(words, output))
        process.start()
    is_terminated = False
    while (exit_code := _exit_code(process)) is None:
        if stop.requested and not is_terminated:
            process.terminate()
            is_terminated = True
        time.sleep(_POLL_SECONDS)
    return exit_code


def _exit_code(process: subprocess.Popen[bytes] | BaseProcess) -> int | None:
    """Return the exit code; None while the process runs."""
    if isinstance(process, BaseProcess):
        return process.exitcode
    return process.poll()


def _run_command(words: Sequence[str], output: Path) -> None:
    """Run a command in the forked process, which does not outlive the process that started it."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with output.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.argv = ["megatron-opsft", *words]
    runpy.run_module("megatron_opsft", run_name="__main__")


def _end_with_parent() -> None:
    # To the kernel the parent is the server that forks, which lives on for a while.
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
