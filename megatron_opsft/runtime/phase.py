"""What this process is doing: for those who watch it, for the console, and for its last words; and
whether it was asked to stop.

Imports no torch: the command line asks for the last words before anything is loaded.
"""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_opsft.runtime.device import Device

log = logging.getLogger("megatron_opsft")

EVERY_SECONDS = 30.0  # of a phase the console has a line
REQUEUE_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: schedulers requeue on it
AT_ONCE_EXIT_CODE = 128 + signal.SIGINT
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A phase of a step; `number` counts the phases entered so far, the same on every rank.

    entered: `time.monotonic()` of this process. step 0: before the first.
    """

    name: str
    step: int
    number: int
    entered: float

    def __str__(self) -> str:
        return (
            f"phase {self.name} of step {self.step}"
            if self.step
            else f"phase {self.name}"
        )


@dataclass(slots=True)
class Count:
    """How many of its phase's responses this process has.

    tokens: drawn so far, of the responses that are not done too; max_tokens: of all of them at
    most.
    """

    done: int = 0
    total: int = 0
    tokens: int = 0
    max_tokens: int = 0
    began: float = field(default_factory=time.monotonic)

    def describe(self, now: float) -> str:
        """Such as `, 128 of 512 responses on this rank, 812 tokens/s, at most 240 s left`; "" where
        nothing is counted.
        """
        if not self.total:
            return ""
        text = f", {self.done} of {self.total} responses on this rank"
        seconds = now - self.began
        if self.tokens and seconds > 0:
            rate = self.tokens / seconds
            left = f"at most {(self.max_tokens - self.tokens) / rate:,.0f}"
            if self.done:
                left = f"about {seconds / self.done * (self.total - self.done):,.0f}"
            text += f", {rate:,.0f} tokens/s, {left} s left"
        return text


class Interrupted(Exception):
    """A phase ended early because a stop was requested."""


_current = Phase(name="start", step=0, number=0, entered=time.monotonic())
_count = Count()
_asked: Callable[[], bool] | None = None


def enter_phase(name: str, step: int | None = None) -> None:
    """Enter the phase `name`, of another step if one is given.

    The ranks of a run enter the same phases in the same order.
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
    """The phase ends when this many responses are done. max_tokens: of all of them."""
    global _count
    _count = Count(total=total, max_tokens=max_tokens)


def count_done(number: int) -> None:
    """Count this many more as done. Errors: `Interrupted`, where that may be and was asked for."""
    _count.done += number
    if _asked is not None and _asked():
        raise Interrupted


def count_tokens(number: int) -> None:
    """Count this many more drawn tokens."""
    _count.tokens += number


@contextmanager
def interruptible(asked: Callable[[], bool]) -> Iterator[None]:
    """Inside, `count_done` raises `Interrupted` on this rank once `asked` says so."""
    global _asked
    _asked = asked
    try:
        yield
    finally:
        _asked = None


def is_interruptible() -> bool:
    """The same on every rank."""
    return _asked is not None


def current_phase() -> Phase:
    """The phase of this process."""
    return _current


def describe_rank() -> str:
    """Such as `rank 3 on node042 in phase train of step 17`."""
    return f"rank {os.environ.get('RANK', '0')} on {socket.gethostname()} in {_current}"


class Stopwatch:
    """`with watch.phase("train"):` adds to `seconds["train"]`; the device is drained at both
    ends. It is also the phase that the watchdog knows of.
    """

    def __init__(self, device: "Device") -> None:
        self._device = device
        self._start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        enter_phase(name)
        self._device.synchronize()
        start = time.perf_counter()
        yield
        self._device.synchronize()
        spent = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + spent

    def total(self) -> float:
        """Seconds since the watch was made."""
        return time.perf_counter() - self._start


def announce(text: str) -> None:
    """Log what begins, on rank 0."""
    if _is_main():
        log.info(text)


@contextmanager
def heartbeat(every_seconds: float = EVERY_SECONDS) -> Iterator[None]:
    """On rank 0 a line at regular intervals of a phase.

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
            log.info(describe_progress(said - phase.entered))


def describe_progress(seconds: float) -> str:
    """Such as `step 3, rollout: 60 s, 128 of 512 responses on this rank`."""
    phase = current_phase()
    where = f"step {phase.step}, {phase.name}" if phase.step else phase.name
    return f"{where}: {seconds:.0f} s{_count.describe(time.monotonic())}"


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
