"""The phase that this process is in, for the watchdog, the console and error messages; and requests
to stop.

Imports no torch: the command line needs the phase for errors before anything is loaded.
"""

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_opsft.errors import log
from megatron_opsft.records import record
from megatron_opsft.runtime.launched import launched_rank

if TYPE_CHECKING:
    from megatron_opsft.runtime.device import Device


EVERY_SECONDS = 30.0  # between two lines on the console in a long phase
REQUEUE_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: schedulers requeue on it
AT_ONCE_EXIT_CODE = 128 + signal.SIGINT
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


@record
class Phase:
    """A phase of a step."""

    name: str
    step: int
    """0: before the first step."""
    number: int
    """How many phases this process has entered; the same on every rank."""
    entered: float
    """`time.monotonic()` of this process when it entered the phase."""

    def __str__(self) -> str:
        of_step = f" of step {self.step}" if self.step else ""
        return f"phase {self.name}{of_step}"


@dataclass(slots=True)
class Count:
    """How many of the responses of its phase this process has sampled."""

    done: int = 0
    total: int = 0
    tokens: int = 0
    """Tokens sampled so far, including those of responses that are not done."""
    max_tokens: int = 0
    """Most tokens that all responses together may have."""
    began: float = field(default_factory=time.monotonic)

    def describe(self, now: float) -> str:
        """Return `, 128 of 512 responses on this rank, 812 tokens/s, at most 240 s left`, for
        example; "" if nothing is counted.
        """
        if not self.total:
            return ""
        text = f", {self.done} of {self.total} responses on this rank"
        seconds = now - self.began
        if self.tokens and seconds > 0:
            rate = self.tokens / seconds
            estimate = f"at most {(self.max_tokens - self.tokens) / rate:,.0f}"
            if self.done:
                to_go = seconds / self.done * (self.total - self.done)
                estimate = f"about {to_go:,.0f}"
            text += f", {rate:,.0f} tokens/s, {estimate} s left"
        return text


class Interrupted(Exception):
    """A phase ended early because a stop was requested."""


_current = Phase(name="start", step=0, number=0, entered=time.monotonic())
_count = Count()
_asked: Callable[[], bool] | None = None


def enter_phase(name: str, step: int | None = None) -> None:
    """Enter a phase. step: if it is another step's than the phase before.

    All ranks of a run enter the same phases in the same order.
    """
    global _current, _count
    _count = Count()
    _current = Phase(
        name=name,
        step=_current.step if step is None else step,
        number=_current.number + 1,
        entered=time.monotonic(),
    )


def expect(total: int, max_tokens: int = 0) -> None:
    """Tell how many responses, with at most how many tokens in all, the phase will sample."""
    global _count
    _count = Count(total=total, max_tokens=max_tokens)


def count_done(number: int) -> None:
    """Count this many more responses as done.

    Errors: `Interrupted` inside `interruptible`, if a stop was requested.
    """
    _count.done += number
    if _asked is not None and _asked():
        raise Interrupted


def count_tokens(number: int) -> None:
    """Count this many more sampled tokens."""
    _count.tokens += number


@contextmanager
def interruptible(asked: Callable[[], bool]) -> Iterator[None]:
    """Let `count_done` raise `Interrupted` on this rank, inside the block, once `asked` is true."""
    global _asked
    _asked = asked
    try:
        yield
    finally:
        _asked = None


def is_interruptible() -> bool:
    """True inside `interruptible`, which all ranks enter together."""
    return _asked is not None


def current_phase() -> Phase:
    """Return the phase that this process is in."""
    return _current


def describe_rank() -> str:
    """Return, for example, `rank 3 on node042 in phase train of step 17`."""
    return f"rank {launched_rank()} on {socket.gethostname()} in {_current}"


class Stopwatch:
    """Measures the seconds of each phase of a step.

    `with watch.phase("train"):` enters the phase, as `enter_phase` does, and adds its duration to
    `seconds["train"]`. It waits for the device at both ends. The seconds of a phase inside another
    count for the inner one alone.
    """

    def __init__(self, device: "Device") -> None:
        self._device = device
        self._start = time.perf_counter()
        self._open: list[str] = []  # phases, the outer ones first
        self._inner = 0.0  # seconds of the phases inside the current one
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Enter the phase, and add the seconds of the block to it."""
        inner_before = self._inner
        self._open.append(name)
        enter_phase(name)
        self._device.synchronize()
        start = time.perf_counter()
        self._inner = 0.0
        try:
            yield
        finally:
            self._open.pop()
        self._device.synchronize()
        duration = time.perf_counter() - start
        own = duration - self._inner
        self.seconds[name] = self.seconds.get(name, 0.0) + own
        self._inner = inner_before + duration
        if self._open:
            enter_phase(self._open[-1])

    def total(self) -> float:
        """Return the seconds since this stopwatch was made."""
        return time.perf_counter() - self._start


def announce(text: str) -> None:
    """Log on rank 0 what begins now."""
    if launched_rank() == 0:
        log.info(text)


@contextmanager
def heartbeat(every_seconds: float = EVERY_SECONDS) -> Iterator[None]:
    """Log on rank 0, inside the block, a progress line every `every_seconds` of a phase.

    The line counts what rank 0 has done; the other ranks are about as far.
    """
    if launched_rank() > 0:
        yield
        return
    over = threading.Event()

    def beat() -> None:
        """Log a line whenever neither a line nor a new phase came for `every_seconds`."""
        logged_at = time.monotonic()
        while not over.wait(min(1.0, every_seconds / 4)):
            entered = current_phase().entered
            if time.monotonic() - max(logged_at, entered) >= every_seconds:
                logged_at = time.monotonic()
                log.info(describe_progress(logged_at - entered))

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def describe_progress(seconds: float) -> str:
    """Return, for example, `step 3, rollout: 60 s, 128 of 512 responses on this rank`."""
    phase = current_phase()
    where = f"step {phase.step}, {phase.name}" if phase.step else phase.name
    return f"{where}: {seconds:.0f} s{_count.describe(time.monotonic())}"


class StopSignal:
    """The request to stop a run. `requested` becomes true on a signal or after `max_minutes` (0: no
    limit), and stays true.

    A Ctrl-C after a first signal ends the process at once.
    """

    def __init__(self, max_minutes: float) -> None:
        self._first_signal = 0  # its number; 0: none yet
        self._deadline = math.inf
        if max_minutes:
            self._deadline = time.monotonic() + 60 * max_minutes
        for number in heard_signals():
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: Any) -> None:
        """Handle a signal of this number."""
        if not self._first_signal:
            if launched_rank() == 0:
                say_stopping(number)
            self._first_signal = number
        elif number == signal.SIGINT:
            if launched_rank() == 0:
                say_stopped_at_once()
            os._exit(AT_ONCE_EXIT_CODE)

    @property
    def requested(self) -> bool:
        """True if this rank was asked to stop; all ranks must agree before any of them stops."""
        return self.signalled or time.monotonic() >= self._deadline

    @property
    def signalled(self) -> bool:
        """True if a signal asked this rank to stop."""
        return self._first_signal != 0

    @property
    def unsaved_exit_code(self) -> int:
        """Exit code of a run that stopped before its first checkpoint."""
        return 128 + (self._first_signal or signal.SIGTERM)


def heard_signals() -> list[signal.Signals]:
    """Return `STOP_SIGNALS`, but not SIGHUP under nohup, which lets a process ignore it."""
    signals = list(STOP_SIGNALS)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signals.remove(signal.SIGHUP)
    return signals


def let_signals_end() -> None:
    """Let every signal of `StopSignal` end the process again: nothing is left to be saved."""
    for number in heard_signals():
        is_interrupt = number == signal.SIGINT
        signal.signal(
            number, signal.default_int_handler if is_interrupt else signal.SIG_DFL
        )


def say_stopping(number: int) -> None:
    """Write to standard error what this signal does; safe in a signal handler."""
    message = f"{signal.Signals(number).name}: stopping after this step"
    if number == signal.SIGINT:
        message = "stopping after this step; Ctrl-C again stops at once"
    _write_error(message)


def say_stopped_at_once() -> None:
    """Write to standard error that a second Ctrl-C ends everything; safe in a signal handler."""
    _write_error("stopped at once; what was saved before stays")


def _write_error(message: str) -> None:
    with suppress(OSError):  # the terminal may be closed
        os.write(2, f"{message}\n".encode())
