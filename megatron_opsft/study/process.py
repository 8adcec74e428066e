"""Commands of `megatron-opsft` as processes: forked from one that has imported the libraries once,
or started by a launcher of the user's.
"""

import multiprocessing
import os
import runpy
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from pathlib import Path

from megatron_opsft.runtime.phase import StopSignal

_LIBRARIES = ["megatron_opsft.cli", "megatron_opsft.train", "megatron_opsft.evaluate.run"]
_SECONDS_BETWEEN_LOOKS = 0.1


class Commands:
    """launcher: the command that stands for `megatron-opsft`, such as `torchrun --nproc-per-node 8
    -m megatron_opsft`; "": processes of this machine, of one rank each.
    """

    def __init__(self, launcher: str = "") -> None:
        self._launcher = shlex.split(launcher)
        self._forks = multiprocessing.get_context("forkserver")
        if not launcher:
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            os.environ.setdefault("PYTHONWARNINGS", "ignore")  # as the commands do themselves
            self._forks.set_forkserver_preload(_LIBRARIES)

    def call(self, words: Sequence[str], log: Path, stop: StopSignal) -> int:
        """The exit code of `megatron-opsft *words`; what it says is added to `log`.

        128 + n: ended by signal n. A requested stop becomes a SIGTERM.
        """
        if self._launcher:
            with log.open("ab") as output:
                started = subprocess.Popen(
                    [*self._launcher, *words], stdout=output, stderr=subprocess.STDOUT
                )
            return _wait(started.poll, started.terminate, stop)
        forked = self._forks.Process(target=_command, args=(list(words), log))
        forked.start()
        return _wait(lambda: forked.exitcode, forked.terminate, stop)


def _wait(poll: Callable[[], int | None], terminate: Callable[[], None], stop: StopSignal) -> int:
    told = False
    while (code := poll()) is None:
        if stop.requested and not told:
            terminate()
            told = True
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return code if code >= 0 else 128 - code


def _command(words: list[str], log: Path) -> None:
    """In the forked process. It does not outlive the one that asked for it."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with log.open("ab") as output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
    sys.argv = ["megatron-opsft", *words]
    runpy.run_module("megatron_opsft", run_name="__main__")


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
