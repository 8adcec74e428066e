"""Signs of life on the console: what a run that says nothing is doing."""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_opsft.runtime.phase import current_count, current_phase

log = logging.getLogger("megatron_opsft")

EVERY_SECONDS = 30.0


def announce(text: str) -> None:
    """Say what begins, on rank 0."""
    if _is_main():
        log.info(text)


@contextmanager
def heartbeat(every_seconds: float = EVERY_SECONDS) -> Iterator[None]:
    """On rank 0 a line for every so many seconds of a phase; none where a terminal shows it.

    The line counts what this rank has done: the others are about as far.
    """
    if not _is_main():
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(over, every_seconds), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def is_live_terminal() -> bool:
    """Whether stdout is a terminal that can redraw lines: a run is shown there as it goes."""
    can_draw = os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
    return sys.stdout.isatty() and can_draw


def _is_main() -> bool:
    """By the launcher's variables: there may be no ranks yet."""
    return os.environ.get("RANK", "0") == "0"


def _watch(over: threading.Event, every_seconds: float) -> None:
    said = time.monotonic()
    number = current_phase().number
    while not over.wait(min(1.0, every_seconds / 4)):
        phase = current_phase()
        if phase.number != number:
            number, said = phase.number, phase.entered
        if time.monotonic() - said >= every_seconds:
            said = time.monotonic()
            if not (is_live_terminal() and current_count().total):
                log.info(describe_progress(said - phase.entered))


def describe_progress(seconds: float) -> str:
    """Such as `step 3, rollout: 60 s, 128 of 512 responses on this rank`."""
    phase, count = current_phase(), current_count()
    where = f"step {phase.step}, {phase.name}" if phase.step else phase.name
    how_far = ""
    if count.total:
        how_far = f", {count.done} of {count.total} {count.what} on this rank"
        how_far += count.describe_rate(time.monotonic())
    return f"{where}: {seconds:.0f} s{how_far}"
