"""Wall-clock seconds of the phases of a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_opsft.runtime.device import Device, synchronize
from megatron_opsft.runtime.phase import enter_phase


class Stopwatch:
    """`with watch.phase("train"):` adds to `seconds["train"]`; the device is drained at both
    ends. It is also the phase that the watchdog knows of.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        enter_phase(name)
        synchronize(self._device)
        start = time.perf_counter()
        yield
        synchronize(self._device)
        spent = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + spent

    def total(self) -> float:
        """Seconds since the watch was made."""
        return time.perf_counter() - self._start
