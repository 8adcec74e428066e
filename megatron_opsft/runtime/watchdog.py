"""Ends a job within a bounded time, with one message, when a rank dies, hangs, or fails.

Every rank has a thread that tells rank 0 what it does and hears from rank 0: those of rank 0's node
directly, those of another node through that node's first rank. A rank that dies closes its
connection; one that is stopped falls silent; one that is stuck stays in a phase for too long. Rank
0 makes the diagnosis, says it, and tells all to end. When the rank that hears others is not heard
itself, they say so. What a process says last is said through `report_failure`, so that of many
errors that come from one only that one is shown.

Imports no torch: the command line asks it for its last words before anything is loaded.
"""

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_opsft.runtime.diagnosis import (
    PEER_LOST_EXIT_CODE,
    Diagnosis,
    Limits,
    Process,
    listeners,
)
from megatron_opsft.runtime.phase import current_phase
from megatron_opsft.runtime.process_start import started_at
from megatron_opsft.runtime.watch_relay import WatchRelay
from megatron_opsft.runtime.watch_server import WatchServer

CLAIM = ".failure_"  # + a job's token: whoever creates it in the run's directory speaks
_DIAGNOSIS_SECONDS = 5.0
_LEAVE_SECONDS = 30.0

_watchdog: "Watchdog | None" = None


def this_process(rank: int) -> Process:
    """For the others to know this rank's process by."""
    me = os.getpid()
    return Process(rank=rank, host=socket.gethostname(), pid=me, started=started_at(me))


class Watchdog:
    """This rank's end; on a rank that hears others that end too. One at a time in a process."""

    def __init__(
        self,
        processes: Sequence[Process],
        me: Process,
        address: tuple[str, int],
        token: str,
        limits: Limits,
        directory: Path,
        listener: socket.socket | None,
    ) -> None:
        """processes: of all ranks. address: where the rank listens that hears this one. listener:
        the socket at which this rank hears others, if it does.

        directory: where all ranks can create files, for one of them to speak.
        """
        global _watchdog
        self._processes = {process.rank: process for process in processes}
        self._me = me
        above = listeners(processes)
        self._above = self._processes[above[me.rank]]
        self._limits = limits
        self._claim = directory / f"{CLAIM}{token}"
        self._above_where = "phase start"
        self._diagnosis: Diagnosis | None = None
        self._diagnosed = threading.Event()
        self._reporting = self._leaving = False
        self._server: WatchServer | None = None
        self._relay: WatchRelay | None = None
        if me.rank == 0:
            assert listener is not None
            self._server = WatchServer(processes, token, listener, limits, self._announce)
        self._socket = socket.create_connection(address, timeout=60)
        self._socket.settimeout(min(0.2, limits.beat_seconds))
        self._lock = threading.Lock()
        self._send({"token": token, "rank": me.rank})
        if me.rank and listener is not None:
            below = [rank for rank, other in above.items() if other == me.rank]
            self._relay = WatchRelay(below, token, listener, limits, self._send)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        _watchdog = self

    def report(self, code: int, message: str) -> Diagnosis | None:
        """Tell the others that this rank fails, and hear whose fault it is; None: nobody says."""
        self._reporting = True
        with contextlib.suppress(OSError):
            self._send({"failed": [code, message]})
        self._diagnosed.wait(_DIAGNOSIS_SECONDS)
        self._wait_for_others()
        return self._diagnosis

    def leave(self) -> None:
        """Say farewell; a rank that hears others waits for theirs."""
        global _watchdog
        if self._relay is not None:
            self._relay.join()
        self._leaving = True
        self._send({"bye": True})
        self._thread.join(_LEAVE_SECONDS)
        if self._server is not None:
            self._server.join()
            if self._server.diagnosis is not None:
                os._exit(self._server.diagnosis.code)
        self._socket.close()
        _watchdog = None

    def _wait_for_others(self) -> None:
        """Until those that this rank hears know the end as well."""
        for hearing in (self._server, self._relay):
            if hearing is not None:
                hearing.done.wait(_DIAGNOSIS_SECONDS)

    def _send(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _watch(self) -> None:
        next_beat = 0.0
        reported = -1
        heard = last = time.monotonic()
        rest = b""
        while not self._leaving:
            now = time.monotonic()
            if now - last > self._limits.silence_seconds / 2:  # this process itself stood still
                heard = now
            last = now
            try:
                here = current_phase()
                if now >= next_beat or here.number != reported:
                    next_beat = now + self._limits.beat_seconds
                    reported = here.number
                    self._send({"beat": [str(here), here.number, now - here.entered]})
                data = self._socket.recv(65536)
            except TimeoutError:
                if now - heard > self._limits.silence_seconds:
                    seconds = f"{self._limits.silence_seconds:.0f} s (run.silence_seconds)"
                    self._lose_above(f"has given no sign of life for {seconds}; it was")
                continue
            except OSError:
                data = b""
            if not data:
                self._lose_above("died")
                return
            heard = time.monotonic()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._hear(json.loads(line))

    def _hear(self, message: dict[str, Any]) -> None:
        if "beat" in message:
            self._above_where = message["beat"]
        if "end" in message:
            self._end(Diagnosis(**message["end"]))

    def _lose_above(self, how: str) -> None:
        """The rank above cannot be heard: nobody but those below it can say so of rank 0, and
        nobody but they can be told so where it is another.
        """
        if self._leaving or self._diagnosed.is_set():
            return
        name = f"rank {self._above.rank} on {self._above.host}"
        diagnosis = Diagnosis(
            rank=self._above.rank,
            code=PEER_LOST_EXIT_CODE,
            kind="died" if how == "died" else "silent",
            message=f"{name} {how} in {self._above_where}",
        )
        self._say(diagnosis)
        self._end(diagnosis)

    def _say(self, diagnosis: Diagnosis) -> None:
        """Print the diagnosis, unless another rank has already."""
        try:
            os.close(os.open(self._claim, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        except OSError:
            pass  # no file can be created: better said twice than never
        sys.stderr.write(f"error: {diagnosis.message}\n")  # at once: other ranks write there too
        sys.stderr.flush()

    def _end(self, diagnosis: Diagnosis) -> None:
        """End this process as the diagnosis says, or let whoever reports a failure do it."""
        if diagnosis.kind == "stuck" and diagnosis.rank == self._me.rank:
            faulthandler.dump_traceback()  # where it is stuck, of all threads
        self._kill(diagnosis)
        self._diagnosis = diagnosis
        self._diagnosed.set()
        if self._relay is not None:
            self._relay.end(diagnosis)
        if self._reporting:
            return
        self._wait_for_others()
        os._exit(diagnosis.code)

    def _announce(self, diagnosis: Diagnosis) -> None:
        """Who fails by itself says so itself; for the others rank 0 does."""
        if diagnosis.kind != "failed":
            self._say(diagnosis)

    def _kill(self, diagnosis: Diagnosis) -> None:
        """A process that is stopped ends neither by itself nor on SIGTERM."""
        culprit = self._processes[diagnosis.rank]
        if diagnosis.kind != "silent" or culprit.host != self._me.host:
            return
        if started_at(culprit.pid) == culprit.started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(culprit.pid, signal.SIGKILL)


def report_failure(code: int, message: str) -> Diagnosis | None:
    """See `Watchdog.report`; None where no watchdog runs."""
    return _watchdog.report(code, message) if _watchdog is not None else None


def is_watched() -> bool:
    """Whether this process is one of a job whose ranks watch each other."""
    return _watchdog is not None
