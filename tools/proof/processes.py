"""One command with a time limit, and an end to everything that it started.

Linux: processes are found in /proc, and orphans come to this process instead of init.
"""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_GRACE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """exit_code: None if the limit was reached; leftovers: processes it had left running."""

    exit_code: int | None
    seconds: float
    leftovers: int


def adopt_orphans() -> None:
    """A process whose parent dies becomes a child of this one, and is found and ended with it."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run_limited(
    command: Sequence[str], limit_seconds: float, *, env: Mapping[str, str], cwd: Path, logs: Path
) -> Ended:
    """Run to its end or its limit; whatever it started is gone then, new sessions included.

    logs: without suffix; `.out` and `.err` are written. The caller has no other children.
    """
    started = time.monotonic()
    with open(f"{logs}.out", "wb") as out, open(f"{logs}.err", "wb") as err, no_children_left():
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
        )
        try:
            exit_code = process.wait(timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            exit_code = None
        seconds = time.monotonic() - started
        leftovers = len(descendants()) if exit_code is not None else 0
    return Ended(exit_code=exit_code, seconds=seconds, leftovers=leftovers)


@contextmanager
def no_children_left() -> Iterator[None]:
    """Every process below this one is killed on the way out, also when an error leads there."""
    try:
        yield
    finally:
        deadline = time.monotonic() + _GRACE_SECONDS
        while (found := descendants()) and time.monotonic() < deadline:
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
            _reap()


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def descendants() -> list[int]:
    """All living processes below this one."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):  # it ended meanwhile
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(entry.name))
    found, frontier = [], [os.getpid()]
    while frontier:
        below = children.get(frontier.pop(), [])
        found += below
        frontier += below
    return found
