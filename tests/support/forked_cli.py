"""Runs of the command line, each in a process of its own, without paying for the imports each time.

The runs are complete: their own process, output and exit code.
"""

import gc
import multiprocessing
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]
# All processes of the tests are forked from a server that has imported what they need, and pytest,
# as a forked process imports what started it.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["pytest", "preloaded"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a run ended; a negative exit code is the number of the signal that ended it."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """The one error line of bad input."""
        assert self.exit_code == 2 and "Traceback" not in self.stderr, self.stderr
        (line,) = [line for line in self.stderr.splitlines() if line.startswith("error: ")]
        return line


class Run:
    """A run that was started."""

    def __init__(self, process: Any, directory: Path) -> None:
        self.pid: int = process.pid
        self.process = process
        self._directory = directory

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self.process.exitcode

    def _said(self, name: str) -> str:
        return (self._directory / name).read_text(encoding="utf-8", errors="replace")

    @property
    def stderr(self) -> str:
        """What it has written there so far."""
        return self._said("stderr")

    def wait(self, timeout: float = 300) -> Finished:
        """Its end. Errors: AssertionError after `timeout` seconds; the run is killed then."""
        self.process.join(timeout)
        code, out, err = self.poll(), self._said("stdout"), self.stderr
        if code is None:
            self.process.kill()
        assert code is not None, f"still running after {timeout} s:\n{out}\n{err}"
        return Finished(exit_code=code, stdout=out, stderr=err)


class ForkedCli:
    """directory: for what the runs write to standard output and error."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._runs: list[Run] = []
        forkserver.ensure_running()  # before a test changes the environment

    def start(self, argv: Sequence[object], prelude: str = "") -> Run:
        """`megatron-opsft *argv`; prelude: Python that the process executes first."""
        directory = self._directory / f"run{len(self._runs)}"
        directory.mkdir()
        for name in ("stdout", "stderr"):  # there even if the run is killed before it opens them
            (directory / name).touch()
        words = [str(word) for word in argv]
        process = FORKS.Process(target=_run, args=(words, prelude, directory))
        process.start()
        self._runs.append(Run(process, directory))
        return self._runs[-1]

    def run(self, argv: Sequence[object], prelude: str = "") -> Finished:
        """`start` and `wait`."""
        return self.start(argv, prelude).wait()

    def run_script(self, script: str, *words: str, wait: float = 300) -> Finished:
        """`python SCRIPT WORDS`, of this project; otherwise as `run`. wait: seconds at most."""
        prelude = (
            "import runpy, sys\n"
            f"sys.argv = [{script!r}, *{words!r}]\n"
            f"sys.path.insert(0, {str((ROOT / script).parent)!r})\n"
            f"runpy.run_path({script!r}, run_name='__main__')\n"
            "sys.exit()\n"
        )
        return self.start([], prelude).wait(wait)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        for run in self._runs:
            run.process.kill()


def _run(words: list[str], prelude: str, directory: Path) -> None:
    """In the forked process."""
    gc.freeze()  # no collection looks at what is imported
    os.chdir(ROOT)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(directory / name, os.O_WRONLY), number)
    sys.argv = ["megatron-opsft", *words]
    code = 1
    try:
        exec(prelude, {})
        from megatron_opsft.commands.cli import main

        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
