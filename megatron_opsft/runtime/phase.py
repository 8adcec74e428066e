"""What this process is doing, for those who watch it and for its own last words."""

import os
import socket
import time
from dataclasses import dataclass


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
    """How far this process is within its phase, where that can be counted."""

    done: int = 0
    total: int = 0
    what: str = ""


_current = Phase(name="start", step=0, number=0, entered=time.monotonic())
_count = Count()


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


def expect(total: int, what: str) -> None:
    """The phase will be over when so many are done; what: such as `responses`."""
    global _count
    _count = Count(total=total, what=what)


def count_done(number: int) -> None:
    """So many more are done."""
    _count.done += number


def current_count() -> Count:
    """How far this process is within its phase."""
    return _count


def current_phase() -> Phase:
    """What this process is in."""
    return _current


def describe_rank() -> str:
    """Such as `rank 3 on node042 in phase train of step 17`."""
    return f"rank {os.environ.get('RANK', '0')} on {socket.gethostname()} in {_current}"
