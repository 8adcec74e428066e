"""Asks the training loop to stop in good order: SIGTERM, SIGUSR1, or a time limit."""

import signal
import time
from typing import Any

REQUEUE_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: schedulers requeue on it


class StopSignal:
    """`requested` turns true on a signal or after `max_minutes` (0: no limit) and stays so."""

    def __init__(self, max_minutes: float) -> None:
        self._signalled = False
        self._deadline = time.monotonic() + 60 * max_minutes if max_minutes else None
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: Any) -> None:
        self._signalled = True

    @property
    def requested(self) -> bool:
        """Whether this rank was asked to stop; the ranks must agree before any of them stops."""
        late = self._deadline is not None and time.monotonic() >= self._deadline
        return self._signalled or late
