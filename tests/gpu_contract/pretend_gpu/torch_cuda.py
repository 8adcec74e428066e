"""`torch.cuda` and `torch.accelerator` of a pretended GPU.

Their Python functions stay torch's own, with what they accept; the C functions below them are
replaced. Streams and events are classes of C: here stand-ins whose methods take what the real ones
take.
"""

import functools
import inspect
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from pretend_gpu.marks import H100, Gpu


def cuda_stand_ins(gpu: Gpu) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, stand-in)."""
    cuda: Any = torch.cuda
    functions = {**_device_functions(gpu), **_memory_functions(gpu)}
    for name, function in functions.items():
        yield torch._C, name, function
    for name in ("exchange", "maybeExchange"):
        alias = {"exchange": "_exchange_device", "maybeExchange": "_maybe_exchange_device"}[name]
        yield cuda, alias, functions[f"_cuda_{name}Device"]
    yield cuda, "_initialized", True
    yield cuda, "_cached_device_count", gpu.num_gpus
    yield cuda, "_get_device_properties", lambda index: H100
    yield cuda, "get_device_capability", lambda device=None: (H100.major, H100.minor)
    yield cuda, "default_generators", (gpu.generator,) * gpu.num_gpus
    yield cuda, "_cudart", SimpleNamespace(cudaMemGetInfo=_memory_info(gpu))
    stream, event = _stream_class(gpu), _event_class(gpu)
    for name, value in (("Stream", stream), ("Event", event)):
        yield cuda, name, value
        yield cuda.streams, name, value


def _device_functions(gpu: Gpu) -> dict[str, Callable[..., Any]]:
    """Of the current device, its streams and the wait for it."""

    def set_device(index: int) -> int:
        before = gpu.index
        if index >= 0:
            gpu.index = index
        return before

    found = {
        "_cuda_getDeviceCount": lambda: gpu.num_gpus,
        "_cuda_getDevice": lambda: gpu.index,
        "_cuda_setDevice": set_device,
        "_cuda_exchangeDevice": set_device,
        "_cuda_maybeExchangeDevice": set_device,
        "_cuda_synchronize": gpu.finish_copies,
        "_cuda_getCurrentStream": lambda index: (0, gpu.index, 1),
        "_cuda_getDefaultStream": lambda index: (0, gpu.index, 1),
        "_cuda_setStream": lambda **stream: None,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_canDeviceAccessPeer": lambda device, peer: True,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_ipc_collect": lambda: None,
        "_accelerator_getAccelerator": lambda: torch.device("cuda"),
        "_accelerator_getDeviceIndex": lambda: gpu.index,
        "_accelerator_setDeviceIndex": set_device,
        "_accelerator_exchangeDevice": set_device,
        "_accelerator_maybeExchangeDevice": set_device,
        "_accelerator_getStream": lambda index: torch.cuda.Stream(),
        "_accelerator_setStream": lambda stream: None,
        "_accelerator_synchronizeDevice": lambda index: gpu.finish_copies(),
    }
    return found


def _memory_info(gpu: Gpu) -> Callable[[int], tuple[int, int]]:
    return lambda device: (H100.total_memory - gpu.num_bytes, H100.total_memory)


def _memory_functions(gpu: Gpu) -> dict[str, Callable[..., Any]]:
    """Bytes of storages stand for those of the caching allocator."""

    def stats(device: int) -> dict[str, Any]:
        numbers = {"current": gpu.num_bytes, "peak": gpu.peak_bytes, "allocated": 0, "freed": 0}
        names = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
        return {name: {"all": numbers} for name in names}

    def reset_peak(device: int) -> None:
        gpu.peak_bytes = gpu.num_bytes

    return {
        "_cuda_memoryStats": stats,
        "_cuda_resetPeakMemoryStats": reset_peak,
        "_cuda_emptyCache": lambda: None,
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_emptyCache": lambda: None,
        "_accelerator_getDeviceStats": stats,
        "_accelerator_resetPeakStats": reset_peak,
        "_accelerator_getMemoryInfo": _memory_info(gpu),
    }


def bound(stand_in: type, real: type) -> type:
    """The class, each method of which now takes what the real class's method of its name takes."""
    for name, function in list(vars(stand_in).items()):
        original = real.__dict__.get(name)
        if isinstance(function, staticmethod):  # __new__
            setattr(stand_in, name, _checked(function.__func__, original.__func__))
        elif inspect.isfunction(function) and original is not None:
            setattr(stand_in, name, _checked(function, original))
    return stand_in


def _checked(function: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(real)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        return function(*call.args, **call.kwargs)

    return called


def _stream_class(gpu: Gpu) -> type:
    class Stream:
        """The one queue."""

        cuda_stream = stream_id = 0
        device_type = 1

        def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> "Stream":
            return object.__new__(cls)

        @property
        def device(self) -> torch.device:
            return gpu.device

        @property
        def device_index(self) -> int:
            return gpu.index

        def wait_event(self, event: Any) -> None:
            """Already so, in one queue."""

        def wait_stream(self, stream: Any) -> None:
            """Already so, in one queue."""

        def record_event(self, event: Any = None) -> Any:
            event = torch.cuda.Event() if event is None else event
            event.record(self)
            return event

        def synchronize(self) -> None:
            gpu.finish_copies()

        def query(self) -> bool:
            gpu.finish_copies()
            return True

        def is_capturing(self) -> bool:
            return False

        def __eq__(self, o: object) -> bool:
            return isinstance(o, Stream)

        def __hash__(self) -> int:
            return 0

    return bound(Stream, torch.cuda.Stream)


def _event_class(gpu: Gpu) -> type:
    class Event:
        """A place in the queue: the copies that were begun before it."""

        num_copies = 0
        seconds = 0.0

        def __new__(cls, *args: Any, **kwargs: Any) -> "Event":
            return object.__new__(cls)

        def record(self, stream: Any = None) -> None:
            self.num_copies, self.seconds = gpu.num_copies, time.perf_counter()

        def wait(self, stream: Any = None) -> None:
            """Already so, in one queue."""

        def query(self) -> bool:
            gpu.finish_copies(self.num_copies)
            return True

        def synchronize(self) -> None:
            gpu.finish_copies(self.num_copies)

        def elapsed_time(self, end_event: "Event") -> float:
            return 1e3 * (end_event.seconds - self.seconds)

    return bound(Event, torch.cuda.Event)
