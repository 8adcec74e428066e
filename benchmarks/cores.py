"""What the machine was like while something ran on it: what other processes took, and how fast its
cores were.

Cores of a virtual machine may run at half their speed for seconds at a time, each on its own, when
neighbours on the same hardware are busy. No counter of the guest says so; the same small work that
takes longer does.
"""

import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Thread

import psutil

_SECONDS_BETWEEN = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """During some time. others: share of it that other processes took; probe: seconds of CPU that
    the same small work took on the slowest of some cores.
    """

    others: float
    probe: float


def probe() -> float:
    """Seconds of CPU that some small work takes on the core of this thread."""
    start = time.thread_time()
    sum(range(60_000))
    return time.thread_time() - start


def fastest_core() -> int:
    """The core that is fastest now; takes half a second for each."""
    allowed = os.sched_getaffinity(0)
    seconds = {}
    for core in allowed:
        os.sched_setaffinity(0, {core})
        seconds[core] = sum(probe() for _ in range(500))
    os.sched_setaffinity(0, allowed)
    return min(seconds, key=seconds.__getitem__)


class Watch:
    """Samples the machine ten times a second, at 1 % of its cores."""

    def __init__(self) -> None:
        # Time, CPU seconds of the machine, CPU seconds of this process's children.
        self._spent: list[tuple[float, float, float]] = []
        self._probes: dict[int, list[tuple[float, float]]] = {}  # core -> time, seconds

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Sample until its end; may be used again."""
        stop = Event()
        threads = [Thread(target=self._account, args=(stop,))]
        threads += [Thread(target=self._probe, args=(stop, c)) for c in os.sched_getaffinity(0)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def machine(self, start: float, stop: float, cores: Collection[int]) -> Machine:
        """Between two times. cores: those whose speed matters."""
        start, stop = start - _SECONDS_BETWEEN, stop + _SECONDS_BETWEEN
        return Machine(others=self._others(start, stop), probe=self._slowest(start, stop, cores))

    def best_probe(self) -> float:
        """Seconds of a probe at full speed: a twentieth of all were faster."""
        found = sorted(seconds for probes in self._probes.values() for _, seconds in probes)
        return found[len(found) // 20] if found else float("inf")

    def _account(self, stop: Event) -> None:
        children: dict[int, float] = {}
        while not stop.wait(_SECONDS_BETWEEN):
            times = psutil.cpu_times()
            busy = sum(times) - times.idle - getattr(times, "iowait", 0.0)
            for child in psutil.Process().children(recursive=True):
                try:
                    used = child.cpu_times()
                    children[child.pid] = used.user + used.system
                except psutil.Error:
                    continue
            self._spent.append((time.time(), busy, sum(children.values())))

    def _probe(self, stop: Event, core: int) -> None:
        os.sched_setaffinity(0, {core})  # of this thread
        found = self._probes.setdefault(core, [])
        while not stop.wait(_SECONDS_BETWEEN):
            found.append((time.time(), probe()))

    def _others(self, start: float, stop: float) -> float:
        """Also this process itself; 1 where nothing was sampled."""
        inside = [sample for sample in self._spent if start <= sample[0] <= stop]
        if len(inside) < 2:
            return 1.0
        (t0, busy0, own0), (t1, busy1, own1) = inside[0], inside[-1]
        return max(0.0, (busy1 - busy0 - own1 + own0) / (t1 - t0) / os.cpu_count())

    def _slowest(self, start: float, stop: float, cores: Collection[int]) -> float:
        """Mean over the time; infinite where nothing was sampled."""
        inside = [[s for at, s in self._probes[c] if start <= at <= stop] for c in cores]
        return max(sum(some) / len(some) if some else float("inf") for some in inside)
