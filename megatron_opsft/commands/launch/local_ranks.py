"""Ranks on this machine, started by this process, which passes stop signals on to them.

They meet at a socket that this process opens on loopback and hands to rank 0, so that no other
machine can reach the job.
"""

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from types import FrameType
from typing import Self

import psutil

from megatron_opsft.runtime.launched import STORE_SOCKET
from megatron_opsft.runtime.parent import end_with_parent
from megatron_opsft.runtime.phase import (
    AT_ONCE_EXIT_CODE,
    REQUEUE_EXIT_CODE,
    STOP_SIGNALS,
    heard_signals,
    say_stopped_at_once,
    say_stopping,
)

_POLL_SECONDS = 0.05
# After a failure, ranks that have met end each other within 5 s. Others are killed after this time.
_GRACE_SECONDS = 10.0


class LocalRanks:
    """Context manager that starts `num_ranks` ranks and passes stop signals on to them.

    Signal handlers are installed on entry and restored on exit. A stop signal that arrives while
    ranks are being started reaches them once all are started. A second Ctrl-C ends everything at
    once.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._is_stopping = False
        self._on_exit = ExitStack()

    def run(self, arguments: Sequence[str]) -> int:
        """Run `megatron-opsft *arguments` on every rank. Returns the exit code of the first rank
        that failed, or 0.

        A rank that signal n killed has 128 + n; after a stop signal it has 75, even if it was
        stopped before it could handle the signal.
        """
        if self._is_stopping:
            return REQUEUE_EXIT_CODE
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
            ranks = [
                self._start(rank, server, arguments) for rank in range(self._num_ranks)
            ]
        code = self._first_failure(ranks)
        if code < 0:  # as subprocess reports a signal
            code = 128 - code
        if self._is_stopping and code - 128 in STOP_SIGNALS:
            return REQUEUE_EXIT_CODE
        return code

    def _start(
        self, rank: int, server: socket.socket, arguments: Sequence[str]
    ) -> "subprocess.Popen[bytes]":
        """Start one rank, with the variables that torchrun sets. `server`: where ranks meet."""
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._num_ranks),
            "LOCAL_WORLD_SIZE": str(self._num_ranks),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(server.getsockname()[1]),
        }
        # The ranks are not SLURM tasks: they share the CPUs that SLURM gave to this process.
        environment.pop("SLURM_CPUS_PER_TASK", None)
        if self._num_ranks > 1:
            environment.setdefault("OMP_NUM_THREADS", "1")
        inherited = []
        if rank == 0:
            inherited.append(server.fileno())
            environment[STORE_SOCKET] = str(server.fileno())
        return subprocess.Popen(
            [sys.executable, "-m", "megatron_opsft", *arguments],
            env=environment,
            pass_fds=inherited,
            start_new_session=True,  # so that only this process gets a terminal's Ctrl-C
            preexec_fn=partial(end_with_parent, signal.SIGTERM),
        )

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Note a stop signal, which `_first_failure` passes on. A second Ctrl-C kills all ranks and
        this process.
        """
        if number == signal.SIGINT:
            if self._is_stopping:
                for rank in psutil.Process().children():
                    with suppress(psutil.NoSuchProcess):
                        rank.kill()
                say_stopped_at_once()
                os._exit(AT_ONCE_EXIT_CODE)
            say_stopping(number)
        self._is_stopping = True

    def _first_failure(self, ranks: "Sequence[subprocess.Popen[bytes]]") -> int:
        """Wait until all ranks have ended. Returns the exit code of the first that failed, or 0.

        After a stop signal every rank gets one SIGTERM: it writes a checkpoint after its step and
        exits with 75. That is no failure in this respect: the others need time to save their work.
        After a failure the ranks that run on are killed.
        """
        failure = 0
        deadline = math.inf
        is_passed_on = False
        while True:
            codes = [rank.poll() for rank in ranks]  # None: it runs on
            # Once a rank has failed, its code stays.
            failure = failure or next(filter(None, codes), 0)
            if None not in codes:
                return failure
            if self._is_stopping and not is_passed_on:
                is_passed_on = True
                for rank in ranks:
                    rank.terminate()
            if failure not in (0, REQUEUE_EXIT_CODE) and deadline == math.inf:
                deadline = time.monotonic() + _GRACE_SECONDS
            if time.monotonic() > deadline:
                for rank in ranks:
                    rank.kill()
            time.sleep(_POLL_SECONDS)

    def __enter__(self) -> Self:
        for number in heard_signals():
            handler = signal.signal(number, self._pass_on)
            self._on_exit.callback(signal.signal, number, handler)
        return self

    def __exit__(self, *error: object) -> None:
        self._on_exit.close()
