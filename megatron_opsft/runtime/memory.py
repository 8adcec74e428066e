"""Peak memory of a piece of work."""

import ctypes
from pathlib import Path
from types import TracebackType

import torch

from megatron_opsft.runtime.device import Device


def return_freed_memory() -> None:
    """Let this process's resident bytes be its live ones: what is freed goes back to the system,
    from 1 MiB on (glibc keeps up to 32 MiB of each size for later). For measurements.
    """
    mmap_threshold = -3
    ctypes.CDLL(None).mallopt(mmap_threshold, 2**20)


class PeakMemory:
    """`with PeakMemory(device) as peak: ...`; then `peak.extra_bytes` is how much more memory this
    process had at its highest than before: of the CUDA allocator, or resident (Linux).
    """

    extra_bytes: int = 0

    def __init__(self, device: Device) -> None:
        self._is_cuda = device.is_cuda

    def __enter__(self) -> "PeakMemory":
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            self._before = _status_bytes("VmRSS")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        peak = torch.cuda.max_memory_allocated() if self._is_cuda else _status_bytes("VmHWM")
        self.extra_bytes = peak - self._before


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
