"""What is on the pretended GPU, how many bytes that takes, and which copies are under way."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import ref

import torch

H100 = SimpleNamespace(
    major=9,
    minor=0,
    name="NVIDIA H100 80GB HBM3",
    total_memory=85_000_000_000,
    multi_processor_count=132,
    is_integrated=0,
    uuid="GPU-0",
)
CPU = torch.device("cpu")
true_device: Callable[[Any], torch.device] = torch._C.TensorBase.device.__get__  # type: ignore


class Fault(RuntimeError):
    """What CUDA would refuse, or do wrong without a word."""


class Gpu:
    """The GPU of this process.

    A storage is known by the address of its C++ object, and forgotten when that is freed.
    num_bytes, peak_bytes: of all storages on the GPU, now and at most. faults: all that were found,
    also those whose exception somebody caught.
    """

    def __init__(self, num_gpus: int) -> None:
        self.num_gpus = num_gpus
        self.index = 0
        self.num_bytes = self.peak_bytes = 0
        self.faults: list[str] = []
        self.generator = torch.Generator()  # the default one of the GPU
        self.generators = {self.generator._cdata}
        self.pinned: set[int] = set()
        self.undecided: set[int] = set()  # made inside autograd, which did not say where
        self._sizes: dict[int, int] = {}
        self._watched: dict[int, Any] = {}
        # Host memory -> whether the unfinished copy writes it, and how many were begun before.
        self._copies: dict[int, tuple[bool, int]] = {}
        self.num_copies = 0

    @property
    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes."""
        return H100.total_memory - self.num_bytes, H100.total_memory

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)

    def fault(self, what: str) -> None:
        """Errors: `Fault`, always."""
        self.faults.append(f"{what} ({_caller()})")
        raise Fault(what)

    def asked(self, device: Any) -> bool:
        """Whether this argument of a call means the GPU. Errors: `Fault` for another rank's."""
        if device is None:
            return False
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type == "cuda" and device.index not in (None, self.index):
            self.fault(f"a tensor for {device} on a rank whose GPU is {self.device}")
        return device.type == "cuda"

    def holds(self, tensor: torch.Tensor) -> bool:
        return bool(self._sizes) and key_of(tensor) in self._sizes

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor, now on the GPU."""
        key = self.watch(tensor)
        if key is not None and key not in self._sizes:
            self.undecided.discard(key)
            self._sizes[key] = tensor.untyped_storage().nbytes()
            self.num_bytes += self._sizes[key]
            self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        return tensor

    def watch(self, tensor: torch.Tensor) -> int | None:
        """The key of its storage, which is forgotten everywhere when the storage is freed."""
        key = key_of(tensor)
        if key is not None and key not in self._watched:
            self._watched[key] = ref(tensor.untyped_storage(), lambda _: self._forget(key))
        return key

    def _forget(self, key: int) -> None:
        self._watched.pop(key, None)
        self.num_bytes -= self._sizes.pop(key, 0)
        self.pinned.discard(key)
        self.undecided.discard(key)
        self._copies.pop(key, None)

    def begin_copy(self, host: torch.Tensor, *, writes_host: bool) -> None:
        """An asynchronous copy between this memory, which is pinned, and the GPU."""
        key = self.watch(host)
        if key is not None:
            self.num_copies += 1
            self._copies[key] = (writes_host, self.num_copies)

    @property
    def is_copying(self) -> bool:
        return bool(self._copies)

    def finish_copies(self, begun: int | None = None) -> None:
        """A synchronisation: all copies are done, or the first `begun` of them."""
        last = self.num_copies if begun is None else begun
        self._copies = {key: copy for key, copy in self._copies.items() if copy[1] > last}

    def check_host(self, tensor: torch.Tensor, name: str, *, writes: bool) -> None:
        """Errors: `Fault` where a call must not touch memory that a copy still uses."""
        copy = self._copies.get(key_of(tensor)) if self._copies else None  # type: ignore[arg-type]
        if copy is not None and copy[0]:
            self.fault(f"{name} of host memory that an unfinished copy from the GPU writes")
        if copy is not None and writes:
            self.fault(f"{name} writes host memory that an unfinished copy to the GPU reads")


def key_of(tensor: torch.Tensor) -> int | None:
    """Of the memory behind it, which views share; None where there is none."""
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return None


def _caller() -> str:
    """File and line of the innermost caller outside of the libraries and of this folder."""
    frame = sys._getframe(1)
    inside = ("/torch/", "/numpy/", "/pretend_gpu/")
    while frame.f_back and any(part in frame.f_code.co_filename for part in inside):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
