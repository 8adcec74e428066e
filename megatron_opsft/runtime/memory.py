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
        peak = torch.cuda.max_memory_allocated() if self._is_cuda else peak_resident_bytes()
        self.extra_bytes = peak - self._before


def peak_memory_bytes(device: Device) -> int:
    """Most that this rank has had since its start: of the CUDA allocator, or resident."""
    return torch.cuda.max_memory_allocated() if device.is_cuda else peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Of this process since its start; 0 where the kernel does not tell."""
    return _status_bytes("VmHWM")  # not getrusage: a child begins with its parent's peak there


def _status_bytes(field: str) -> int:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith(field + ":")), 0)
