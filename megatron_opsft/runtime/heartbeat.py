"""Signs of life on the console: what a run that says nothing is doing."""

import logging
import os
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Self

from megatron_opsft.runtime.phase import current_count, current_phase

log = logging.getLogger("megatron_opsft")

EVERY_SECONDS = 30.0


def announce(text: str) -> None:
    """Say what begins, on rank 0."""
    if _is_main():
        log.info(text)


def heartbeat() -> AbstractContextManager[object]:
    """A `Heartbeat` on rank 0, nothing elsewhere."""
    return Heartbeat() if _is_main() else nullcontext()


def _is_main() -> bool:
    """By the launcher's variables: there may be no ranks yet."""
    return os.environ.get("RANK", "0") == "0"


class Heartbeat:
    """A line for every half minute that a phase lasts, in a `with`.

    The line counts what this rank has done: the others are about as far.
    """

    def __init__(self, every_seconds: float = EVERY_SECONDS) -> None:
        self._every_seconds = every_seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        said = time.monotonic()
        number = current_phase().number
        while not self._over.wait(min(1.0, self._every_seconds / 4)):
            phase = current_phase()
            if phase.number != number:
                number, said = phase.number, phase.entered
            if time.monotonic() - said >= self._every_seconds:
                said = time.monotonic()
                log.info(describe_progress(said - phase.entered))


def describe_progress(seconds: float) -> str:
    """Such as `step 3, rollout: 60 s, 128 of 512 responses on this rank`."""
    phase, count = current_phase(), current_count()
    where = f"step {phase.step}, {phase.name}" if phase.step else phase.name
    how_far = f", {count.done} of {count.total} {count.what} on this rank" if count.total else ""
    return f"{where}: {seconds:.0f} s{how_far}"
