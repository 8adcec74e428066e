"""Asks the training loop to stop in good order: Ctrl-C, SIGTERM, SIGUSR1, SIGHUP, a time limit."""

import os
import signal
import time
from contextlib import suppress
from typing import Any

REQUEUE_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: schedulers requeue on it
AT_ONCE_EXIT_CODE = 128 + signal.SIGINT
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


class StopSignal:
    """`requested` turns true on a signal or after `max_minutes` (0: no limit) and stays so.

    A Ctrl-C after any of them ends the process at once.
    """

    def __init__(self, max_minutes: float) -> None:
        self._number = 0
        self._deadline = time.monotonic() + 60 * max_minutes if max_minutes else None
        for number in heard_signals():
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: Any) -> None:
        if self._number and number == signal.SIGINT:
            os._exit(AT_ONCE_EXIT_CODE)
        if not self._number and os.environ.get("RANK", "0") == "0":
            say_stopping(number)
        self._number = self._number or number

    @property
    def requested(self) -> bool:
        """Whether this rank was asked to stop; the ranks must agree before any of them stops."""
        late = self._deadline is not None and time.monotonic() >= self._deadline
        return self.signalled or late

    @property
    def signalled(self) -> bool:
        """Whether a signal asked this rank to stop."""
        return self._number != 0

    @property
    def unsaved_exit_code(self) -> int:
        """Of a run that was asked to stop before it had anything to save."""
        return 128 + (self._number or signal.SIGTERM)


def heard_signals() -> list[signal.Signals]:
    """`STOP_SIGNALS`; without SIGHUP under nohup, which has it ignored."""
    is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [s for s in STOP_SIGNALS if not (is_nohup and s is signal.SIGHUP)]


def say_stopping(number: int) -> None:
    """What this signal does; safe in a signal handler."""
    said = f"{signal.Signals(number).name}: stopping after this step"
    if number == signal.SIGINT:
        said = "stopping after this step; Ctrl-C again stops at once"
    with suppress(OSError):  # the terminal may be gone
        os.write(2, f"{said}\n".encode())
