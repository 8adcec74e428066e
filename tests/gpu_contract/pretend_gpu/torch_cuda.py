"""`torch.cuda` and `torch.accelerator` of a pretended GPU.

Their Python functions stay torch's own, with what they accept; the C functions below them are
replaced. Streams and events are C's: the methods of their stand-ins take what the real ones take.
"""

import inspect
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from pretend_gpu.marks import H100, Gpu, checked


def cuda_stand_ins(gpu: Gpu) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, stand-in)."""
    for name, function in _c_functions(gpu).items():
        yield torch._C, name, function
        if hasattr(torch.cuda.graphs, name):
            yield torch.cuda.graphs, name, function
        if name.endswith("xchangeDevice"):
            alias = {"_cuda_exchangeDevice": "_exchange_device"}.get(name, "_maybe_exchange_device")
            yield torch.cuda, alias, function
    yield torch.cuda, "_initialized", True
    yield torch.cuda, "_cached_device_count", gpu.num_gpus
    yield torch.cuda, "_get_device_properties", lambda index: H100
    yield torch.cuda, "default_generators", (gpu.generator,) * gpu.num_gpus
    yield torch.cuda, "_cudart", _cudart(gpu)
    for name, stand_in in (("Stream", _stream_class(gpu)), ("Event", _event_class(gpu))):
        yield torch.cuda, name, stand_in
        yield torch.cuda.streams, name, stand_in


def _cudart(gpu: Gpu) -> SimpleNamespace:
    """torch's bindings of CUDA's runtime, whose arguments have no names."""

    def host_register(pointer: int, num_bytes: int, flags: int, /) -> int:
        return gpu.register(pointer, num_bytes)

    def host_unregister(pointer: int, /) -> int:
        return gpu.unregister(pointer)

    return SimpleNamespace(
        cudaMemGetInfo=lambda index, /: gpu.memory_info,
        cudaHostRegister=host_register,
        cudaHostUnregister=host_unregister,
    )


def _c_functions(gpu: Gpu) -> dict[str, Callable[..., Any]]:
    def set_device(index: int) -> int:
        before, gpu.index = gpu.index, index if index >= 0 else gpu.index
        return before

    def memory_stats(index: int) -> dict[str, Any]:
        """Bytes of storages stand for those of the caching allocator."""
        numbers = {"current": gpu.num_bytes, "peak": gpu.peak_bytes}
        return {name: {"all": numbers} for name in ("allocated_bytes", "reserved_bytes")}

    def reset_peak(index: int) -> None:
        gpu.peak_bytes = gpu.num_bytes

    return {
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
        "_cuda_canDeviceAccessPeer": lambda index, peer: True,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_memoryStats": memory_stats,
        "_cuda_hostMemoryStats": lambda: {"allocated_bytes": {"current": gpu.torch_pinned_bytes}},
        "_cuda_resetPeakMemoryStats": reset_peak,
        "_cuda_emptyCache": lambda: None,
        "_cuda_ipc_collect": lambda: None,
        "_accelerator_getAccelerator": lambda: torch.device("cuda"),
        "_accelerator_getDeviceIndex": lambda: gpu.index,
        "_accelerator_getStream": lambda index: torch.cuda.Stream(),
        "_accelerator_synchronizeDevice": lambda index: gpu.finish_copies(),
    }


def _bound(stand_in: type, real: type) -> type:
    """The class, each method of which now takes what the real class's method of its name takes."""
    for name, function in list(vars(stand_in).items()):
        original = real.__dict__.get(name.replace("__init__", "__new__"))
        if inspect.isfunction(function) and original is not None:
            setattr(stand_in, name, checked(function, getattr(original, "__func__", original)))
    return stand_in


def _stream_class(gpu: Gpu) -> type:
    class Stream:
        """The one queue, in which everything waits for what came before it."""

        cuda_stream = stream_id = 0
        device_type = 1
        device = property(lambda self: gpu.device)
        device_index = property(lambda self: gpu.index)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        def wait_event(self, event: Any) -> None:
            pass

        def wait_stream(self, stream: Any) -> None:
            pass

        def record_event(self, event: Any = None) -> Any:
            event = torch.cuda.Event() if event is None else event
            event.record(self)
            return event

        def synchronize(self) -> None:
            gpu.finish_copies()

        def is_capturing(self) -> bool:
            return False

    return _bound(Stream, torch.cuda.Stream)


def _event_class(gpu: Gpu) -> type:
    class Event:
        """A place in the queue: so many copies were begun before it."""

        num_copies = 0
        seconds = 0.0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        def record(self, stream: Any = None) -> None:
            self.num_copies, self.seconds = gpu.num_copies, time.perf_counter()

        def wait(self, stream: Any = None) -> None:
            pass

        def query(self) -> bool:
            self.synchronize()
            return True

        def synchronize(self) -> None:
            gpu.finish_copies(self.num_copies)

        def elapsed_time(self, end_event: "Event") -> float:
            return 1e3 * (end_event.seconds - self.seconds)

    return _bound(Event, torch.cuda.Event)
