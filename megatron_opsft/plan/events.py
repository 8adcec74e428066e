"""A discrete-event simulator: processes are generators, time is a number.

A process yields what it waits for: `Work` (compute, which may share cores with others), a `Signal`
that another process fires, or seconds. Nothing here is left to chance: what happens at one time
happens in the order in which it was asked for.
"""

import heapq
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from itertools import count


@dataclass(slots=True)
class Signal:
    """Something that happens after `missing` arrivals; whoever waits goes on then."""

    missing: int = 1
    waiting: list["Process"] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Work:
    """Compute that takes so many seconds where `width` cores are free for it.

    cores: what it shares with other work; None: a device of its own.
    """

    seconds: float
    cores: "Cores | None" = None
    width: int = 1


Process = Generator[Work | Signal | float, None, None]


class Clock:
    """Runs processes until all have ended; `now` in seconds from the start."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._alive = 0

    def start(self, process: Process) -> None:
        """It runs from now on."""
        self._alive += 1
        self.resume(process)

    def run(self) -> None:
        """Until nothing is left. RuntimeError where processes wait for what never happens."""
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()
        if self._alive:
            raise RuntimeError(f"{self._alive} processes wait for ever")

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Call something at a later time."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), act))

    def arrive(self, signal: Signal) -> Signal:
        """One arrival; the last one fires the signal. The signal itself, to wait for."""
        signal.missing -= 1
        if signal.missing == 0:
            waiting, signal.waiting = signal.waiting, []
            for process in waiting:
                self.after(0.0, partial(self.resume, process))
        return signal

    def resume(self, process: Process) -> None:
        """Run it up to the next thing that it has to wait for."""
        for wanted in process:
            if isinstance(wanted, Signal):
                if wanted.missing > 0:
                    wanted.waiting.append(process)
                    return
            elif isinstance(wanted, Work) and wanted.cores is not None:
                wanted.cores.begin(wanted, process)
                return
            else:
                seconds = wanted.seconds if isinstance(wanted, Work) else wanted
                self.after(seconds, partial(self.resume, process))
                return
        self._alive -= 1


class Cores:
    """So many cores that share out what is asked of them: with more work than cores all of it gets
    slower alike (processor sharing).
    """

    def __init__(self, clock: Clock, num_cores: float) -> None:
        self._clock = clock
        self._num_cores = num_cores
        self._width = 0  # cores that would be busy if there were enough
        self._served = 0.0  # seconds that a piece of work has got that was there all the time
        self._updated = 0.0
        self._ends: list[tuple[float, int, int, Process]] = []  # by `_served`
        self._order = count()
        self._plan = 0  # of the next end; older ones are void

    def begin(self, work: Work, process: Process) -> None:
        """Called by the clock; `process` goes on when the work is done."""
        self._serve()
        self._width += work.width
        end = self._served + work.seconds
        heapq.heappush(self._ends, (end, next(self._order), work.width, process))
        self._expect()

    def _rate(self) -> float:
        return min(1.0, self._num_cores / self._width) if self._width else 1.0

    def _serve(self) -> None:
        self._served += (self._clock.now - self._updated) * self._rate()
        self._updated = self._clock.now

    def _expect(self) -> None:
        """Plan for the next piece of work that will be done."""
        self._plan += 1
        if self._ends:
            left = max(0.0, self._ends[0][0] - self._served) / self._rate()
            self._clock.after(left, partial(self._finish, self._plan))

    def _finish(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._serve()
        end, _, width, process = heapq.heappop(self._ends)
        self._served = max(self._served, end)  # rounding
        self._width -= width
        self._expect()
        self._clock.resume(process)
