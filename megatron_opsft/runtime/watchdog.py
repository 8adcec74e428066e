"""Ends a job within a bounded time, with one message, when a rank dies, hangs, or fails.

Every rank has a thread that puts what it does into the job's store every few seconds: its phase,
and which processes of its machine's ranks have ended. Rank 0 reads all of it, judges, and puts the
end into the store, where all ranks read it; the others judge rank 0. What a process says last is
said through `report_failure`, so that of many errors that come from one only that one is shown.

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
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_opsft.runtime.console import say
from megatron_opsft.runtime.failed_rank import Diagnosis, Limits, Peer, find_failed_rank
from megatron_opsft.runtime.phase import current_phase
from megatron_opsft.runtime.sealed_store import SealedStore

if TYPE_CHECKING:
    from megatron_opsft.runtime.job import Job

_URGENT_SECONDS = (
    0.1  # between two looks at the store while this rank leaves, or one has failed
)
_LEAVE_SECONDS = 30.0

_watchdog: "Watchdog | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A rank's process; `started`, as of `_started_at`, tells it from a later one of its id."""

    rank: int
    host: str
    pid: int
    started: str | None

    @property
    def is_running(self) -> bool:
        """Whether this machine has it; on another machine this means nothing."""
        return self.started is not None and _started_at(self.pid) == self.started


def this_process(rank: int) -> Process:
    """For the others to know this rank's process by."""
    me = os.getpid()
    return Process(
        rank=rank, host=socket.gethostname(), pid=me, started=_started_at(me)
    )


def _started_at(pid: int) -> str | None:
    """Ticks from the machine's start to that of a living process, which no step of the clock moves
    (proc_pid_stat(5)). None for one that has ended, and where there is no /proc: silence alone
    tells there.
    """
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        state, *fields = stat.rpartition(")")[2].split()
        return None if state == "Z" else fields[18]
    return None


class Watchdog:
    """The watch of one rank over the others; of rank 0 over all."""

    def __init__(
        self, job: "Job", processes: Sequence[Process], limits: Limits, secret: bytes
    ) -> None:
        """processes: of all ranks, in their order. secret: the same on every rank, and known to
        nobody else.
        """
        self._job = job  # rank 0's may be the only holder of the store itself
        prefix = f"watch_{job.add(f'watches_{job.rank}', 1)}"
        # A connection of the watching thread alone.
        self._store = SealedStore(job.store.clone(), prefix, secret)
        self._limits = limits
        me = processes[job.rank]
        # A process of a container of its own is not in this one's table.
        self._mates = [
            p for p in processes if p.host == me.host and p != me and p.is_running
        ]
        now = time.monotonic()
        self._peers = [
            Peer(rank=p.rank, name=f"rank {p.rank} on {p.host}", heard=now, entered=now)
            for p in (processes if job.is_main else processes[:1])
        ]
        elsewhere = (p.rank for p in processes if p.host != processes[0].host)
        self._deputy = next(elsewhere, min(1, job.world_size - 1))
        self._failed: tuple[int, str] | None = None
        self._place = 0  # among the job's failures, from 1
        self._diagnosis: Diagnosis | None = None
        self._rounds = self._quiet_beats = 0
        self._leaving, self._urgent = threading.Event(), threading.Event()
        self._waits = job.is_main  # when it leaves: others may need its store
        self._told, self._over = threading.Event(), threading.Event()
        self._ending = threading.Lock()
        self._say(leaving=False)
        self._thread = threading.Thread(
            target=self._watch, name="watchdog", daemon=True
        )
        self._thread.start()
        if not job.is_main:
            threading.Thread(
                target=self._guard, name="watchdog-guard", daemon=True
            ).start()

    def report(self, code: int, message: str) -> Diagnosis | None:
        """Report that this rank fails; returns whose fault it is, or None if unknown."""
        self._failed = (code, message)
        self._urgent.set()
        self._told.wait(2 * self._limits.silence_seconds + 5)
        return self._diagnosis

    def leave(self) -> None:
        """Leave the watch; rank 0 waits for the others, which may need its store."""
        self._leaving.set()
        self._urgent.set()
        self._thread.join(None if self._waits else _LEAVE_SECONDS)

    def abandon(self) -> None:
        """Leave the watch without waiting for anybody: the job has failed, the process goes on."""
        self._waits = False
        self.leave()

    def _watch(self) -> None:
        leaving = False
        while not (leaving and all(peer.left for peer in self._peers)):
            leaving = self._leaving.is_set()
            try:
                self._say(leaving=leaving)
                if leaving and not self._waits:
                    break
                end = self._hear()
            except Exception:  # the store does not answer any more
                if not leaving:
                    self._lose_store()
                break
            if end is not None:
                self._end(end)
                break
            self._rounds += 1
            if self._urgent.is_set() or any(peer.failed for peer in self._peers):
                time.sleep(_URGENT_SECONDS)
            else:
                self._urgent.wait(self._limits.beat_seconds)
        self._over.set()

    def _say(self, *, leaving: bool) -> None:
        if self._failed and not self._place:
            self._store.join("failures", self._job.rank)
            failures = self._store.joined("failures")
            if (
                self._job.rank in failures
            ):  # else a stranger was quicker, and the next look tries
                self._place = 1 + failures.index(self._job.rank)
        failed = (self._place, *self._failed) if self._place and self._failed else None
        here = current_phase()
        age = time.monotonic() - here.entered
        dead = [mate.rank for mate in self._mates if not mate.is_running]
        word = [str(here), here.number, age, failed, leaving, dead]
        self._store.put(str(self._job.rank), json.dumps(word))

    def _hear(self) -> Diagnosis | None:
        """Read what those have said whom this rank judges; the end, if the job is to end."""
        words = self._store.read([str(peer.rank) for peer in self._peers])
        now = time.monotonic()
        for peer, word in zip(self._peers, words, strict=True):
            if word is not None and word != peer.word:
                peer.understand(word, now)
        if (
            not self._job.is_main
        ):  # its failure is judged by itself, when it has heard all
            self._peers[0].failed = None
            self._peers[0].dead = [
                mate.rank for mate in self._mates if not mate.is_running
            ]
        found = find_failed_rank(self._peers, now, self._limits)
        end = self._store.agree("end", json.dumps(asdict(found)) if found else None)
        if end is None:
            return None
        self._store.join("ending", self._job.rank)  # this rank needs the store no more
        return Diagnosis(**json.loads(end))

    def _guard(self) -> None:
        """A call of a store whose process is stopped does not return: count beats without one."""
        rounds = -1
        while not self._over.wait(self._limits.beat_seconds):
            self._quiet_beats = self._quiet_beats + 1 if rounds == self._rounds else 0
            rounds = self._rounds
            if (
                self._quiet_beats * self._limits.beat_seconds
                > self._limits.silence_seconds
            ):
                self._lose_store()

    def _lose_store(self) -> None:
        """Rank 0 cannot be heard, and nobody can be told so: every other rank finds it itself."""
        first = self._peers[0]
        kind, message = "silent", first.describe_silence(self._limits)
        if self._quiet_beats < 2:
            is_launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            who = f"{first.name}, or its launcher," if is_launchers else first.name
            kind, message = "died", f"{who} died in {first.where}"
        self._end(Diagnosis(rank=0, kind=kind, message=message))

    def _end(self, diagnosis: Diagnosis) -> None:
        """End this process as the diagnosis says, or let whoever reports a failure do it."""
        if not self._ending.acquire(blocking=False):
            return
        if diagnosis.kind == "stuck" and diagnosis.rank == self._job.rank:
            faulthandler.dump_traceback()  # where it is stuck, of all threads
        # Who fails by itself says so itself; for the others rank 0 does; for rank 0 one rank that
        # does not go with its machine, if there is one.
        is_gone = diagnosis.rank == 0 and diagnosis.kind != "stuck"
        if diagnosis.kind != "failed" and self._job.rank == (
            self._deputy if is_gone else 0
        ):
            say(f"error: {diagnosis.message}", error=True)
        # A process that is stopped ends neither by itself nor on SIGTERM.
        for mate in self._mates:
            if (
                diagnosis.kind == "silent"
                and mate.rank == diagnosis.rank
                and mate.is_running
            ):
                with suppress(ProcessLookupError):
                    os.kill(mate.pid, signal.SIGKILL)
        if self._job.is_main:
            self._wait_for_others(diagnosis)
        self._diagnosis = diagnosis
        self._told.set()
        if self._failed is None:
            os._exit(diagnosis.code)

    def _wait_for_others(self, diagnosis: Diagnosis) -> None:
        """Until they have read the end: the store may go with this process."""
        is_lost = diagnosis.kind in ("died", "silent")
        reading = sum(not peer.left for peer in self._peers) - is_lost
        deadline = time.monotonic() + 2 * self._limits.beat_seconds + 1
        with suppress(Exception):  # the store is a launcher's, which is gone
            while len(self._store.joined("ending")) < reading:
                if time.monotonic() > deadline:
                    break
                time.sleep(_URGENT_SECONDS / 2)


@contextmanager
def watched(job: "Job", limits: Limits) -> Iterator[None]:
    """Inside, the job's ranks watch each other; nothing new where they do already. Every rank
    enters it, and leaves it when it is done; one that raises goes on being watched until it ends,
    or until `abandon_watch`.
    """
    global _watchdog
    if _watchdog is not None:
        yield
        return
    from megatron_opsft.runtime.exchange import all_gather_bytes, from_bytes, to_bytes

    mine = this_process(job.rank), secrets.token_bytes()
    everyone = [from_bytes(part) for part in all_gather_bytes(to_bytes(mine))]
    _, secret = everyone[0]
    _watchdog = Watchdog(job, [process for process, _ in everyone], limits, secret)
    yield
    _watchdog.leave()
    _watchdog = None


def abandon_watch() -> None:
    """See `Watchdog.abandon`; nothing where no watchdog runs."""
    global _watchdog
    if _watchdog is not None:
        _watchdog.abandon()
        _watchdog = None


def report_failure(code: int, message: str) -> Diagnosis | None:
    """See `Watchdog.report`; None where no watchdog runs."""
    return _watchdog.report(code, message) if _watchdog is not None else None


def is_watched() -> bool:
    """Whether this process belongs to a job whose ranks watch each other."""
    return _watchdog is not None
