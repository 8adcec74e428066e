"""What this process is doing, for those who watch it and for its own last words."""

import os
import socket
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A phase of a step; `number` counts the phases entered so far, the same on every rank.

    entered: `time.monotonic()` of this process. step 0: before the first.
    """

    phase: str
    step: int
    number: int
    entered: float

    def __str__(self) -> str:
        return f"phase {self.phase} of step {self.step}" if self.step else f"phase {self.phase}"


_place = Place(phase="start", step=0, number=0, entered=time.monotonic())


def enter(phase: str, step: int | None = None) -> None:
    """This process gets on: it begins `phase`, of another step if one is given.

    The ranks of a run enter the same phases in the same order.
    """
    global _place
    _place = Place(
        phase=phase,
        step=_place.step if step is None else step,
        number=_place.number + 1,
        entered=time.monotonic(),
    )


def place() -> Place:
    """Where this process is."""
    return _place


def whereabouts() -> str:
    """Such as `rank 3 on node042 in phase train of step 17`."""
    return f"rank {os.environ.get('RANK', '0')} on {socket.gethostname()} in {_place}"
