"""Ranks on this machine, started by this process, which passes stop signals on to them.

They find each other through a socket that this process opens on loopback for rank 0, so that no
other machine reaches the job.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, Self

import psutil

from megatron_opsft.runtime.launched import STORE_SOCKET
from megatron_opsft.runtime.parent import end_with_parent
from megatron_opsft.runtime.phase import (
    AT_ONCE_EXIT_CODE,
    REQUEUE_EXIT_CODE,
    STOP_SIGNALS,
    heard_signals,
    say_stopping,
)

_SECONDS_BETWEEN_LOOKS = 0.05
# Ranks that have met end each other after a failure, within 5 s; others are killed after this.
_GRACE_SECONDS = 10.0


class LocalRanks:
    """Starts `num_ranks` ranks and passes stop signals on to them.

    A context: before and after, signals mean what they meant. A stop that comes while ranks start
    reaches them too. A second Ctrl-C ends everything at once.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._stopping = False
        self._ended = threading.Event()
        self._handlers: dict[signal.Signals, Any] = {}

    def run(self, arguments: Sequence[str]) -> int:
        """`megatron-opsft *arguments` on every rank; the exit code of the first that failed, or 0.

        128 + n: killed by signal n. 75 also if a rank was stopped before it listened to signals.
        """
        if self._stopping:
            return REQUEUE_EXIT_CODE
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
            ranks = [
                self._start(rank, server, arguments) for rank in range(self._num_ranks)
            ]
        code = _first_failure(ranks)
        if self._stopping and (-code in STOP_SIGNALS or code - 128 in STOP_SIGNALS):
            return REQUEUE_EXIT_CODE
        return code if code >= 0 else 128 - code

    def _start(
        self, rank: int, server: socket.socket, arguments: Sequence[str]
    ) -> "subprocess.Popen[bytes]":
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._num_ranks),
            "LOCAL_WORLD_SIZE": str(self._num_ranks),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(server.getsockname()[1]),
        }
        # They are no tasks of SLURM's: what it gave this process is theirs together.
        environment.pop("SLURM_CPUS_PER_TASK", None)
        if self._num_ranks > 1:
            environment.setdefault("OMP_NUM_THREADS", "1")
        passed: tuple[int, ...] = ()
        if rank == 0:
            passed = (server.fileno(),)
            environment[STORE_SOCKET] = str(server.fileno())
        return subprocess.Popen(
            [sys.executable, "-m", "megatron_opsft", *arguments],
            env=environment,
            pass_fds=passed,
            start_new_session=True,  # a terminal's Ctrl-C does not reach them by itself
            preexec_fn=partial(end_with_parent, signal.SIGTERM),
        )

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self._stopping and number == signal.SIGINT:
            for rank in psutil.Process().children():
                with suppress(psutil.NoSuchProcess):
                    rank.kill()
            os._exit(AT_ONCE_EXIT_CODE)
        if number == signal.SIGINT:
            say_stopping(number)
        if not self._stopping:
            self._stopping = True
            threading.Thread(target=self._stop_ranks, daemon=True).start()

    def _stop_ranks(self) -> None:
        """Also those that are only now being started, until the context ends. They checkpoint after
        their step, and leave with 75.
        """
        stopped: set[psutil.Process] = set()
        while not self._ended.wait(_SECONDS_BETWEEN_LOOKS):
            for rank in set(psutil.Process().children()) - stopped:
                with suppress(psutil.NoSuchProcess):
                    rank.send_signal(signal.SIGTERM)
                stopped.add(rank)

    def __enter__(self) -> Self:
        self._handlers = {s: signal.signal(s, self._pass_on) for s in heard_signals()}
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


def _first_failure(ranks: "Sequence[subprocess.Popen[bytes]]") -> int:
    """The exit code of the rank that failed first, or 0, when all have ended."""
    failed, killed_at = 0, float("inf")
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = failed or next((code for code in codes if code), 0)
        if None not in codes:
            return failed
        # Who has stopped as asked leaves the others the time to save what they have.
        if failed not in (0, REQUEUE_EXIT_CODE) and killed_at == float("inf"):
            killed_at = time.monotonic() + _GRACE_SECONDS
        if time.monotonic() > killed_at:
            for rank in ranks:
                rank.kill()
        time.sleep(_SECONDS_BETWEEN_LOOKS)
