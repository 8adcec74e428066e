"""One process at a time has the directory of a run or an evaluation, on shared file systems too.

The lock is filelock's lease: a file that only one process can create, with its host and process,
which its owner touches now and then. On the owner's machine the process table says whether the
owner lives; from any other machine only time does: a lock that nobody touches for `SILENT_SECONDS`
is taken over. No clocks are compared, and no lock service of the file system is needed.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import LeaseCompromise, SoftFileLease, Timeout

from megatron_opsft.errors import UserError
from megatron_opsft.preflight.entries import unwritable
from megatron_opsft.runtime.printable import printable

LOCK = ".run_lock"
BEAT_SECONDS = 10.0
SILENT_SECONDS = 60.0  # the same for all who may want the directory


@contextmanager
def locked(directory: Path, option: str = "run.dir=") -> Iterator[None]:
    """Have the directory, which is made if need be. Called by rank 0 alone.

    option: what errors write before the directory.

    Errors: `UserError` naming host and process that has it, or why it cannot be written.
    """
    made = not os.path.exists(directory)
    lease = _lease_of(directory, option)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _acquire(lease, directory, option)
    except OSError as error:
        raise unwritable(directory, error, option) from None
    try:
        yield
    finally:
        with suppress(OSError):
            lease.release()
            if made:
                directory.rmdir()  # only an empty one goes


def check_unlocked(directory: Path) -> None:
    """Errors: `UserError` if a living process of this machine has the directory."""
    lease = _lease_of(directory, "run.dir=")
    if not os.path.exists(directory / LOCK):
        return
    # Timeout, an OSError: a process has it, or had it on another machine.
    with suppress(OSError), lease.acquire(blocking=False):
        return
    _refuse_own_machine(lease, directory, "run.dir=")


def _lease_of(directory: Path, option: str) -> SoftFileLease:
    def leave(lost: LeaseCompromise) -> None:
        """At once where another process has taken the lock over, which was not touched."""
        if lost.reason == "owner-changed":
            sys.stderr.write(
                f"error: {option}{directory} was taken over by {_owner_of(lease)}, as this process "
                f"gave no sign of life for {SILENT_SECONDS:.0f} s\n"
            )
            sys.stderr.flush()
            os._exit(2)

    lease = SoftFileLease(
        directory / LOCK,
        lease_duration=SILENT_SECONDS,
        heartbeat_interval=BEAT_SECONDS,
        on_compromise=leave,
    )
    return lease


def _acquire(lease: SoftFileLease, directory: Path, option: str) -> None:
    """Errors: `UserError` where its owner lives: on this machine at once; on another one when it is
    touched.
    """
    try:
        lease.acquire(blocking=False)
        return
    except Timeout:
        _refuse_own_machine(lease, directory, option)
    line = f"{directory} has a lock of {_owner_of(lease)}: waiting for a sign of it"
    print(printable(line), file=sys.stderr)
    before = _touched_at(directory / LOCK)
    try:
        lease.acquire(
            timeout=2 * SILENT_SECONDS,
            poll_interval=min(1.0, SILENT_SECONDS / 10),
            cancel_check=lambda: _touched_at(directory / LOCK) not in (before, None),
        )
    except Timeout:
        raise _in_use(lease, directory, option) from None


def _refuse_own_machine(lease: SoftFileLease, directory: Path, option: str) -> None:
    """Errors: `UserError` for an owner of this process table; a dead one has been removed."""
    owner = lease.owner
    with TemporaryDirectory() as place, SoftFileLease(Path(place) / LOCK) as mine:
        me = mine.owner
        if owner is not None and me is not None and owner.hostname == me.hostname:
            raise _in_use(lease, directory, option) from None


def _owner_of(lease: SoftFileLease) -> str:
    owner = lease.owner
    if owner is None:
        return "another process"
    return f"process {owner.pid} on {owner.hostname.partition('?')[0]}"


def _in_use(lease: SoftFileLease, directory: Path, option: str) -> UserError:
    return UserError(
        f"{option}{directory} is in use by {_owner_of(lease)}; stop it (kill its process: a run "
        "checkpoints first) or name another directory"
    )


def _touched_at(lock: Path) -> int | None:
    """Opening it makes a network file system ask its server."""
    with suppress(OSError), open(lock, "rb") as file:
        return os.fstat(file.fileno()).st_mtime_ns
    return None
