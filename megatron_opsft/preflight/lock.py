"""One process at a time has a run's directory, on shared file systems too.

The lock is a file that only one process can create. It names host, process and start, and its owner
touches it now and then. On the owner's machine the process table says whether the owner lives; from
any other machine only time does: a lock that nobody touches is watched for `SILENT_SECONDS`, then
taken over. No clocks are compared, and no lock service of the file system is needed.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_opsft.errors import UserError
from megatron_opsft.preflight.entries import unwritable
from megatron_opsft.runtime.printable import printable
from megatron_opsft.runtime.process_start import started_at

LOCK = ".run_lock"
BEAT_SECONDS = 10.0
SILENT_SECONDS = 60.0
_LOADED = time.time()


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The process that has a directory. since: seconds since the epoch, for people to read.

    started: as of `started_at`, which no step of the clock moves.
    process_table: of the machine and container that `pid` is of, where that is known.
    """

    host: str
    pid: int
    since: float
    started: float | None
    process_table: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Have the directory, which is made if need be. Called by rank 0 alone.

    Errors: `UserError` naming host and process that has it, or why it cannot be written.
    """
    me = _this_process()
    made = _make_directory(directory)
    lock = directory / LOCK
    while not _create(lock, me):
        _take_from_dead(lock)
    ended = threading.Event()
    beat = threading.Thread(target=_beat, args=(lock, me, ended), name="lock", daemon=True)
    beat.start()
    try:
        yield
    finally:
        ended.set()
        beat.join()
        with suppress(OSError):
            if _read(lock) == me:
                lock.unlink()
            if made:
                directory.rmdir()  # only an empty one goes


def check_unlocked(directory: Path) -> None:
    """Errors: `UserError` if a living process of this machine has the directory."""
    owner = _read(directory / LOCK)
    if owner is not None and _lives(owner):
        raise _in_use(directory, owner)


def _make_directory(directory: Path) -> bool:
    """Whether it was not there. Errors: `UserError` where it cannot be."""
    made = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(directory, error) from None
    return made


def _create(lock: Path, me: Owner) -> bool:
    """Whether this process created it. Errors: `UserError` where nothing can be written."""
    try:
        handle = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    except OSError as error:
        raise unwritable(lock.parent, error) from None
    with open(handle, "w", encoding="utf-8") as file:
        file.write(json.dumps(asdict(me)))
    return True


def _take_from_dead(lock: Path) -> None:
    """Remove a lock whose owner is gone. Errors: `UserError` if the owner lives."""
    owner = _read(lock)
    if owner is not None and owner.process_table == _process_table():
        if _lives(owner):
            raise _in_use(lock.parent, owner)
    elif _is_touched(lock, owner):
        if owner is not None and _read(lock) == owner:
            raise _in_use(lock.parent, owner)
        return  # it is gone, or was just being written: look again
    # Of several who found it dead one moves it; who moves a living one meanwhile puts it back.
    moved = lock.with_name(f"{LOCK}.{socket.gethostname()}.{os.getpid()}")
    with suppress(FileNotFoundError):
        lock.rename(moved)
        if _read(moved) == owner:
            moved.unlink()
        else:
            moved.rename(lock)


def _in_use(directory: Path, owner: Owner) -> UserError:
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(owner.since))
    return UserError(
        f"run.dir={directory} is in use by {owner}, started {since}; stop that run (kill "
        f"{owner.pid}: it checkpoints first) or name another directory"
    )


def _lives(owner: Owner) -> bool:
    """Whether a process of this process table is the owner, and not a later one of its number."""
    if owner.process_table != _process_table():
        return False
    started = started_at(owner.pid)
    return started is not None and started == owner.started


def _is_touched(lock: Path, owner: Owner | None) -> bool:
    """Whether the lock changes, vanishes or is touched within `SILENT_SECONDS`."""
    before = _touched_at(lock)
    if before is None:
        return True
    if owner is not None:
        line = f"{lock.parent} has a lock of {owner}: waiting for a sign of it"
        print(printable(line), file=sys.stderr)
    deadline = time.monotonic() + SILENT_SECONDS
    while time.monotonic() < deadline:
        if _touched_at(lock) != before:
            return True
        time.sleep(min(1.0, SILENT_SECONDS / 10))
    return False


def _touched_at(lock: Path) -> int | None:
    """Opening it makes a network file system ask its server."""
    with suppress(OSError), open(lock, "rb") as file:
        return os.fstat(file.fileno()).st_mtime_ns
    return None


def _read(lock: Path) -> Owner | None:
    """Whose it is; None where there is none, or one that is still being written."""
    with suppress(OSError, ValueError, TypeError):
        return Owner(**json.loads(lock.read_text(encoding="utf-8")))
    return None


def _beat(lock: Path, me: Owner, ended: threading.Event) -> None:
    """Touch the lock until the end; leave at once where another process has taken it over."""
    while not ended.wait(BEAT_SECONDS):
        owner = _read(lock)
        if owner is not None and owner != me:
            sys.stderr.write(
                f"error: run.dir={lock.parent} was taken over by {owner}, as this process gave no "
                f"sign of life for {SILENT_SECONDS:.0f} s\n"
            )
            sys.stderr.flush()
            os._exit(2)
        with suppress(OSError):
            os.utime(lock)


def _this_process() -> Owner:
    return Owner(
        host=socket.gethostname(),
        pid=os.getpid(),
        since=_LOADED,
        started=started_at(os.getpid()),
        process_table=_process_table(),
    )


def _process_table() -> str:
    """Tells machines, their starts and containers apart; where nothing says so, by host name."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()
