"""What is on the pretended GPU, how many bytes that takes, and which copies are under way."""

import functools
import inspect
import mmap
import sys
from collections import Counter
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


# What `cudaHostRegister` and `cudaHostUnregister` say.
_NO_MEMORY, _IS_REGISTERED, _IS_NOT_REGISTERED = 2, 712, 713


class Memory:
    """What is known of a storage.

    on_gpu: its bytes there. pinned_block: bytes of the block of torch's own pinned memory that it
    has. is_undecided: made inside autograd, which did not say where. copy: the unfinished one that
    uses it, counted from 1; is_written: by that copy.
    """

    storage: Any = None
    on_gpu: int | None = None
    is_undecided = is_written = False
    pinned_block = copy = 0


class Gpu:
    """The GPU of this process.

    A storage is known by the address of its C++ object, and forgotten when that is freed.
    num_bytes, peak_bytes: of all storages on the GPU, now and at most. faults: all that were found,
    also those whose exception somebody caught. registered: address -> bytes of host memory that
    `cudaHostRegister` has pinned. torch_pinned_bytes: of all blocks of torch's own pinned memory.
    can_register: set it to False, and the driver refuses. last_error: of a call that failed; CUDA's
    next kernel is told it.
    """

    def __init__(self, num_gpus: int) -> None:
        self.num_gpus = num_gpus
        self.index = 0
        self.num_bytes = self.peak_bytes = 0
        self.faults: list[str] = []
        self.generator = torch.Generator()  # the default one of the GPU
        self.generators = {self.generator._cdata}  # type: ignore[attr-defined]
        self.registered: dict[int, int] = {}
        self.can_register = True
        self.last_error = 0
        self.torch_pinned_bytes = 0
        self._free_blocks: Counter[int] = Counter()  # of torch's pinned memory, by their bytes
        self._known: dict[int, Memory] = {}
        self._copying: list[Memory] = []
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
        self.faults.append(f"{what} ({caller()})")
        raise Fault(what)

    def asked(self, device: Any) -> bool:
        """Whether this argument of a call means the GPU. Errors: `Fault` for another rank's."""
        if device is None:
            return False
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type == "cuda" and device.index not in (None, self.index):
            self.fault(f"a tensor for {device} on a rank whose GPU is {self.device}")
        return device.type == "cuda"

    def of(self, tensor: torch.Tensor) -> Memory:
        """What is known of the memory behind it, which views share."""
        try:
            key = tensor.untyped_storage()._cdata
        except (RuntimeError, NotImplementedError):  # there is none
            return Memory()
        if (memory := self._known.get(key)) is None:
            memory = self._known[key] = Memory()
            memory.storage = ref(tensor.untyped_storage(), lambda _: self._forget(key))
        return memory

    def holds(self, tensor: torch.Tensor) -> bool:
        return self.of(tensor).on_gpu is not None

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor, now on the GPU."""
        memory = self.of(tensor)
        if memory.on_gpu is None and memory.storage is not None:
            memory.is_undecided = False
            memory.on_gpu = tensor.untyped_storage().nbytes()
            self.num_bytes += memory.on_gpu
            self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        return tensor

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that has another size now."""
        memory = self._known.get(storage._cdata)
        if memory is not None and memory.on_gpu is not None:
            self.num_bytes += storage.nbytes() - memory.on_gpu
            memory.on_gpu = storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.num_bytes)

    def _forget(self, key: int) -> None:
        memory = self._known.pop(key)
        self.num_bytes -= memory.on_gpu or 0
        if memory.pinned_block:
            self._free_blocks[memory.pinned_block] += 1

    def pin(self, tensor: torch.Tensor) -> None:
        """Its memory is torch's own pinned memory: a block of a power of two, which is kept for the
        next one when it is free again (ATen/core/CachingHostAllocator.h).
        """
        memory, num_bytes = self.of(tensor), tensor.untyped_storage().nbytes()
        if memory.pinned_block or not num_bytes:
            return
        memory.pinned_block = 1 << (num_bytes - 1).bit_length()
        if self._free_blocks[memory.pinned_block]:
            self._free_blocks[memory.pinned_block] -= 1
        else:
            self.torch_pinned_bytes += memory.pinned_block

    def register(self, address: int, num_bytes: int) -> int:
        """Pin this host memory; what `cudaHostRegister` says."""
        if not self.can_register:
            self.last_error = _NO_MEMORY
        elif any(
            first < address + num_bytes and address < first + size
            for first, size in self.registered.items()
        ):
            self.last_error = _IS_REGISTERED
        else:
            self.registered[address] = num_bytes
            return 0
        return self.last_error

    def unregister(self, address: int) -> int:
        """Pin it no longer; what `cudaHostUnregister` says. Errors: `Fault` where a copy is still
        under way there.
        """
        if address not in self.registered:
            self.last_error = _IS_NOT_REGISTERED
            return self.last_error
        end = address + self.registered[address]
        for memory in self._copying:
            storage = memory.storage()
            if storage is not None and address <= storage.data_ptr() < end:
                self.fault("cudaHostUnregister of host memory that an unfinished copy uses")
        del self.registered[address]
        return 0

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether its memory is host memory that a copy reads or writes without waiting."""
        memory = self.of(tensor)
        if memory.pinned_block or not self.registered or memory.storage is None:
            return memory.pinned_block > 0
        address = tensor.untyped_storage().data_ptr()
        return any(first <= address < first + size for first, size in self.registered.items())

    @property
    def pinned_bytes(self) -> int:
        """Of host memory: whole pages of what is registered, and torch's blocks, free ones too."""
        page = mmap.PAGESIZE
        num_pages = sum(
            -(-(address + size) // page) - address // page
            for address, size in self.registered.items()
        )
        return num_pages * page + self.torch_pinned_bytes

    def raise_last_error(self) -> None:
        """Errors: `RuntimeError` for what an earlier call left, once."""
        if self.last_error:
            code, self.last_error = self.last_error, 0
            raise RuntimeError(f"CUDA error {code}, which an earlier call has left")

    def begin_copy(self, host: torch.Tensor, *, writes_host: bool) -> None:
        """An asynchronous copy between this memory, which is pinned, and the GPU."""
        self.num_copies += 1
        memory = self.of(host)
        memory.copy, memory.is_written = self.num_copies, writes_host
        self._copying.append(memory)

    @property
    def is_copying(self) -> bool:
        return bool(self._copying)

    def finish_copies(self, begun: int | None = None) -> None:
        """A synchronisation: all copies are done, or the first `begun` of them."""
        last = self.num_copies if begun is None else begun
        for memory in self._copying:
            memory.copy = memory.copy if memory.copy > last else 0
        self._copying = [memory for memory in self._copying if memory.copy]

    def check_host(self, tensor: torch.Tensor, name: str, *, writes: bool) -> None:
        """Errors: `Fault` where a call must not touch memory that a copy still uses."""
        memory = self.of(tensor)
        if memory.copy and memory.is_written:
            self.fault(f"{name} of host memory that an unfinished copy from the GPU writes")
        if memory.copy and writes:
            self.fault(f"{name} writes host memory that an unfinished copy to the GPU reads")


def checked(function: Callable[..., Any], real: Any) -> Callable[..., Any]:
    """The function, which now takes what the real function takes: else a TypeError."""
    signature = inspect.signature(real)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        return function(*call.args, **call.kwargs)

    return called


def caller() -> str:
    """File and line of the innermost caller outside of the libraries and of this folder."""
    frame = sys._getframe(1)
    inside = ("/torch/", "/numpy/", "/pretend_gpu/")
    while frame.f_back and any(part in frame.f_code.co_filename for part in inside):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
