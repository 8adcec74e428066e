"""Ends a job within a bounded time, with one message, when a rank dies, hangs, or fails.

Every rank has a thread that puts a message into the job's store every few seconds: its phase, and
which processes of its machine's ranks have ended. Rank 0 reads all messages, looks for a rank at
fault, and puts its diagnosis into the store, where all ranks read it. The other ranks watch rank 0.
A rank that fails calls `report_failure` before it prints its error, so that only the first error is
shown, and none that follows from it.

Imports no torch: the command line imports it before anything is loaded.
"""

import faulthandler
import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_opsft.records import record
from megatron_opsft.runtime.console import say
from megatron_opsft.runtime.failed_rank import Diagnosis, Limits, Peer, find_failed_rank
from megatron_opsft.runtime.phase import current_phase
from megatron_opsft.runtime.sealed_store import SealedStore

if TYPE_CHECKING:
    from megatron_opsft.runtime.job import Job

# Between two messages while this rank leaves, or a rank has failed.
_URGENT_SECONDS = 0.1
_LEAVE_SECONDS = 30.0

_watchdog: "Watchdog | None" = None


@record
class Process:
    """A rank's process."""

    rank: int
    host: str
    pid: int
    started: str | None
    """`_started_at` of the process, which tells it from a later process with the same pid."""

    @property
    def is_running(self) -> bool:
        """True if the process runs on this machine; meaningless for one on another machine."""
        return self.started is not None and _started_at(self.pid) == self.started


def this_process(rank: int) -> Process:
    """Return the process that calls it, for the other ranks to recognise it."""
    pid = os.getpid()
    return Process(
        rank=rank, host=socket.gethostname(), pid=pid, started=_started_at(pid)
    )


def _started_at(pid: int) -> str | None:
    """Return when a process started, in ticks since the machine did: a change of the clock does not
    change it (proc_pid_stat(5)).

    None if the process has ended, or there is no /proc: then only silence shows that it has ended.
    """
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        _, _, behind_name = stat.rpartition(")")
        fields = behind_name.split()
        if fields[0] != "Z":  # a zombie has ended
            return fields[19]
    return None


class Watchdog:
    """Watches other ranks of the job: rank 0 watches all of them, any other rank only rank 0."""

    def __init__(
        self, job: "Job", processes: Sequence[Process], limits: Limits, secret: bytes
    ) -> None:
        """processes: of all ranks, in rank order. secret: the same on every rank, and unknown to
        everybody else.
        """
        self._job = job  # keeps rank 0's store alive, which the other ranks need
        prefix = f"watch_{job.add(f'watches_{job.rank}', 1)}"
        # The watching thread has a connection of its own.
        self._store = SealedStore(job.store.clone(), prefix, secret)
        self._limits = limits
        me = processes[job.rank]
        # Ranks of this machine, except in other containers, whose processes are not visible here.
        self._mates = [
            p for p in processes if p.host == me.host and p != me and p.is_running
        ]
        now = time.monotonic()
        watched_processes = processes if job.is_main else processes[:1]
        self._peers = [
            Peer(
                rank=p.rank,
                name=f"rank {p.rank} on {p.host}",
                heard_at=now,
                entered_at=now,
            )
            for p in watched_processes
        ]
        # Reports that rank 0 has ended; if possible on another machine, as rank 0's may be lost.
        ranks_elsewhere = (p.rank for p in processes if p.host != processes[0].host)
        self._deputy = next(ranks_elsewhere, min(1, job.world_size - 1))
        self._failed: tuple[int, str] | None = None  # exit code and message
        self._diagnosis: Future[Diagnosis] = Future()
        self._rounds = 0  # how often the store has answered this rank
        self._quiet_beats = 0  # beats since it last did
        self._waits_to_leave = job.is_main  # other ranks may still need its store
        self._leaving = threading.Event()
        self._urgent = threading.Event()
        self._ending = threading.Lock()
        self._send(leaving=False)
        self._thread = threading.Thread(
            target=self._watch, name="watchdog", daemon=True
        )
        self._thread.start()
        if not job.is_main:
            threading.Thread(
                target=self._guard, name="watchdog-guard", daemon=True
            ).start()

    def report(self, code: int, message: str) -> Diagnosis | None:
        """Report that this rank fails, and return the job's diagnosis; None if there is none in
        time.
        """
        self._failed = (code, message)
        self._urgent.set()
        with suppress(TimeoutError):
            return self._diagnosis.result(2 * self._limits.silence_seconds + 5)
        return None

    def leave(self) -> None:
        """Leave the watch; rank 0 waits for the others, which may need its store."""
        self._leaving.set()
        self._urgent.set()
        self._thread.join(None if self._waits_to_leave else _LEAVE_SECONDS)

    def abandon(self) -> None:
        """Leave without waiting for other ranks: the job has failed, the process continues."""
        self._waits_to_leave = False
        self.leave()

    def _watch(self) -> None:
        """Send and read messages until this rank has left, or the job ends: what the thread does.
        A rank that leaves says so in one last message; rank 0 goes on until all others have left.
        """
        leaving = False
        while not (leaving and all(peer.has_left for peer in self._peers)):
            leaving = self._leaving.is_set()
            try:
                self._send(leaving=leaving)
                if leaving and not self._waits_to_leave:
                    break
                diagnosis = self._read()
            except Exception:  # the store does not answer any more
                if not leaving:
                    self._lose_store()
                break
            if diagnosis is not None:
                self._end(diagnosis)
                break
            self._rounds += 1
            if self._urgent.is_set() or any(peer.failure for peer in self._peers):
                time.sleep(_URGENT_SECONDS)
            else:
                self._urgent.wait(self._limits.beat_seconds)

    def _send(self, *, leaving: bool) -> None:
        """Put this rank's message into the store, in the form that `Peer.hear` reads."""
        rank = self._job.rank
        failure = None
        if self._failed:
            # In the order of their failures.
            failed_ranks = self._store.joined("failures")
            if rank not in failed_ranks:
                self._store.join("failures", rank)
                failed_ranks = self._store.joined("failures")
            # It is still missing if a stranger has overwritten the list: the next message tries
            # again.
            if rank in failed_ranks:
                order = 1 + failed_ranks.index(rank)
                failure = (order, *self._failed)
        phase = current_phase()
        seconds = time.monotonic() - phase.entered
        dead = self._dead_mates()
        message = [str(phase), phase.number, seconds, failure, leaving, dead]
        self._store.put(str(rank), json.dumps(message))

    def _dead_mates(self) -> list[int]:
        """Return the ranks of this machine whose processes have ended."""
        return [mate.rank for mate in self._mates if not mate.is_running]

    def _read(self) -> Diagnosis | None:
        """Read the messages of the ranks that this rank watches, and look for one at fault.

        Returns the diagnosis on which all ranks agree; None if the job goes on.
        """
        messages = self._store.read([str(peer.rank) for peer in self._peers])
        now = time.monotonic()
        for peer, message in zip(self._peers, messages, strict=True):
            if message is not None and message != peer.message:
                peer.hear(message, now)
        if not self._job.is_main:
            # Rank 0 itself judges its failure, when it has heard all ranks.
            self._peers[0].failure = None
            self._peers[0].dead = self._dead_mates()
        diagnosis = find_failed_rank(self._peers, now, self._limits)
        proposed = json.dumps(asdict(diagnosis)) if diagnosis else None
        agreed = self._store.agree("end", proposed)
        if agreed is None:
            return None
        self._store.join("ending", self._job.rank)  # this rank needs the store no more
        return Diagnosis(**json.loads(agreed))

    def _guard(self) -> None:
        """End the job if the store does not answer: a call does not return if the process that
        serves the store is stopped. So count the beats without a completed call.
        """
        rounds_before = -1
        while True:
            self._thread.join(self._limits.beat_seconds)
            if not self._thread.is_alive():
                return
            if self._rounds == rounds_before:
                self._quiet_beats += 1
            else:
                self._quiet_beats = 0
            rounds_before = self._rounds
            silence = self._quiet_beats * self._limits.beat_seconds
            if silence > self._limits.silence_seconds:
                self._lose_store()

    def _lose_store(self) -> None:
        """End because rank 0's store is lost: every other rank notices that by itself."""
        first = self._peers[0]
        diagnosis = first.found_silent(self._limits)
        if self._quiet_beats < 2:  # the store did not hang, it failed
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                first.name += ", or its launcher,"
            diagnosis = first.found_dead()
        self._end(diagnosis)

    def _end(self, diagnosis: Diagnosis) -> None:
        """End this process with the diagnosis's exit code; a rank that called `report` gets the
        diagnosis, and ends itself.
        """
        if not self._ending.acquire(blocking=False):
            return
        if diagnosis.kind == "stuck" and diagnosis.rank == self._job.rank:
            faulthandler.dump_traceback()  # of all threads: shows where it is stuck
        if self._job.rank == self._speaker(diagnosis):
            say(f"error: {diagnosis.message}", error=True)
        if diagnosis.kind == "silent":
            self._kill_mate(diagnosis.rank)
        if self._job.is_main:
            self._wait_for_others(diagnosis)
        self._diagnosis.set_result(diagnosis)
        if self._failed is None:
            os._exit(diagnosis.code)

    def _speaker(self, diagnosis: Diagnosis) -> int | None:
        """Return the rank that prints the message.

        A failed rank prints its own, so None. If rank 0 died or is silent, its deputy prints, which
        is on another machine if there is one. For all other diagnoses rank 0 prints.
        """
        if diagnosis.kind == "failed":
            return None
        if diagnosis.rank == 0 and diagnosis.kind != "stuck":
            return self._deputy
        return 0

    def _kill_mate(self, rank: int) -> None:
        """Kill a silent rank of this machine: a stopped process ends neither by itself nor on
        SIGTERM.
        """
        for mate in self._mates:
            if mate.rank == rank and mate.is_running:
                with suppress(ProcessLookupError):
                    os.kill(mate.pid, signal.SIGKILL)

    def _wait_for_others(self, diagnosis: Diagnosis) -> None:
        """Wait until the others have read the diagnosis: the store may end with this process."""
        num_readers = sum(not peer.has_left for peer in self._peers)
        if diagnosis.kind in ("died", "silent"):
            num_readers -= 1
        deadline = time.monotonic() + 2 * self._limits.beat_seconds + 1
        with suppress(Exception):  # the store of a launcher may have ended with it
            while len(self._store.joined("ending")) < num_readers:
                if time.monotonic() > deadline:
                    break
                time.sleep(_URGENT_SECONDS / 2)


@contextmanager
def watched(job: "Job", limits: Limits) -> Iterator[None]:
    """Let the job's ranks watch each other inside the block; does nothing if they do already.

    Every rank enters the block. After an error inside it, a rank is watched until its process ends,
    or until `abandon_watch`.
    """
    global _watchdog
    if _watchdog is not None:
        yield
        return
    from megatron_opsft.runtime.exchange import all_gather_bytes, from_bytes, to_bytes

    vector = to_bytes((this_process(job.rank), secrets.token_bytes()))
    gathered = list(map(from_bytes, all_gather_bytes(vector)))
    processes = [process for process, _ in gathered]
    _, secret = gathered[0]  # rank 0's
    _watchdog = Watchdog(job, processes, limits, secret)
    yield
    _watchdog.leave()
    _watchdog = None


def abandon_watch() -> None:
    """Call `Watchdog.abandon`, if a watchdog runs."""
    global _watchdog
    if _watchdog is not None:
        _watchdog.abandon()
        _watchdog = None


def report_failure(code: int, message: str) -> Diagnosis | None:
    """Call `Watchdog.report`, and return its diagnosis; None if no watchdog runs."""
    return _watchdog.report(code, message) if _watchdog is not None else None


def is_watched() -> bool:
    """True if this process belongs to a job whose ranks watch each other."""
    return _watchdog is not None
