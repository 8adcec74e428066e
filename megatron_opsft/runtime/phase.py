"""What this process is doing, for those who watch it and for its own last words."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


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
        return f"phase {self.name} of step {self.step}" if self.step else f"phase {self.name}"


@dataclass(slots=True)
class Count:
    """How far this process is within its phase, where that can be counted.

    tokens: drawn so far, of the responses that are not done too; max_tokens: of all of them at
    most.
    """

    done: int = 0
    total: int = 0
    what: str = ""
    tokens: int = 0
    max_tokens: int = 0
    began: float = field(default_factory=time.monotonic)

    def describe_rate(self, now: float) -> str:
        """Such as `, 812 tokens/s, at most 240 s left`; "" before the first token."""
        seconds = now - self.began
        if not self.tokens or seconds <= 0:
            return ""
        rate = self.tokens / seconds
        if self.done:
            left = f"about {seconds / self.done * (self.total - self.done):,.0f}"
        else:
            left = f"at most {(self.max_tokens - self.tokens) / rate:,.0f}"
        return f", {rate:,.0f} tokens/s, {left} s left"


class Interrupted(Exception):
    """A phase was left before its end, since somebody asked for it."""


_current = Phase(name="start", step=0, number=0, entered=time.monotonic())
_count = Count()
_asked: Callable[[], bool] | None = None


def enter_phase(name: str, step: int | None = None) -> None:
    """This process gets on: it begins `name`, of another step if one is given.

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


def expect(total: int, what: str, max_tokens: int = 0) -> None:
    """The phase will be over when so many are done; what: such as `responses`. max_tokens: of all
    of them.
    """
    global _count
    _count = Count(total=total, what=what, max_tokens=max_tokens)


def count_done(number: int) -> None:
    """So many more are done. Errors: `Interrupted`, where that may be and was asked for."""
    _count.done += number
    if _asked is not None and _asked():
        raise Interrupted


def count_tokens(number: int) -> None:
    """So many more have been drawn."""
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


def current_count() -> Count:
    """How far this process is within its phase."""
    return _count


def current_phase() -> Phase:
    """What this process is in."""
    return _current


def describe_rank() -> str:
    """Such as `rank 3 on node042 in phase train of step 17`."""
    return f"rank {os.environ.get('RANK', '0')} on {socket.gethostname()} in {_current}"
