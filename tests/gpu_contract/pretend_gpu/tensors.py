"""What Python asks of a tensor, and the functions that make one from data, on a pretended GPU.

A stand-in hands its arguments to the real function, or to torch's parser of them, so that what
torch refuses is refused.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._device import _device_constructors

from pretend_gpu.marks import CPU, Gpu, caller, true_device

_Base: Any = torch._C.TensorBase
_to_copy: Any = torch.ops.aten._to_copy


def tensor_stand_ins(gpu: Gpu) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, stand-in) of methods of `torch.Tensor` and of factories of torch."""
    is_cpu = _Base.is_cpu.__get__
    yield torch.Tensor, "device", property(lambda t: gpu.device if gpu.holds(t) else true_device(t))
    yield torch.Tensor, "is_cuda", property(gpu.holds)
    yield torch.Tensor, "is_cpu", property(lambda tensor: is_cpu(tensor) and not gpu.holds(tensor))
    yield torch.Tensor, "get_device", lambda tensor: gpu.index if gpu.holds(tensor) else -1
    yield torch.Tensor, "record_stream", lambda tensor, stream: None
    for method in (*_moves(gpu), *_pinning(gpu)):
        yield torch.Tensor, method.__name__, method
    for name in ("numpy", "__array__", "tolist"):
        yield torch.Tensor, name, _read_by_host(gpu, name)
    yield torch.Tensor, "new_tensor", _factory(gpu, torch.Tensor.new_tensor)
    from_data = {"tensor", "as_tensor", "asarray"}
    for name in from_data:
        yield torch, name, _factory(gpu, getattr(torch, name))
    if torch.version.cuda is None:
        makers = {make.__name__ for make in _device_constructors()} - from_data
        for name in makers | {name for name in dir(torch) if name.endswith("_like")}:
            if hasattr(torch, name):
                yield torch, name, _with_numbered_device(getattr(torch, name))
    yield torch, "Generator", _generator_class(gpu)
    yield torch.UntypedStorage, "resize_", _resize(gpu)


def _moves(gpu: Gpu) -> Iterator[Callable[..., torch.Tensor]]:
    """The methods by which a tensor changes its device."""
    real = _Base.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], torch.Tensor):
            other, *rest = args
            return to(self, other.device, other.dtype, *rest, **kwargs)
        words, copy = list(args), kwargs.pop("copy", False)
        place = 2 if words and isinstance(words[0], torch.dtype) else 3
        if len(words) > place:
            copy = words.pop(place)
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*words, **kwargs)
        if true_device(self).type != "cpu" or device and device.type not in ("cpu", "cuda"):
            return real(self, *args, **kwargs, copy=copy)
        options = {"dtype": dtype or self.dtype, "memory_format": memory_format}
        held = gpu.holds(self)
        to_gpu = held if device is None else gpu.asked(device)
        if to_gpu == held:
            changed = copy or options["dtype"] != self.dtype or memory_format is not None
            return _to_copy(self, **options) if changed else self
        pinned = non_blocking and not to_gpu
        made = _to_copy(self, **options, device=device, pin_memory=pinned)
        if pinned or non_blocking and gpu.is_pinned(self):
            gpu.begin_copy(made if pinned else self, writes_host=pinned)
        else:
            gpu.finish_copies()
        return made

    def cpu(self: torch.Tensor, memory_format: Any = None) -> torch.Tensor:
        return to(self, "cpu", memory_format=memory_format)

    def cuda(self: torch.Tensor, device: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        return to(self, gpu.device if device is None else device, None, *args, **kwargs)

    yield from (to, cpu, cuda)


def _pinning(gpu: Gpu) -> Iterator[Callable[..., Any]]:
    """And `Tensor.type`, whose answer Megatron's optimizer compares."""
    real = _Base.type

    def type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = real(self, *args, **kwargs)
        named = isinstance(found, str) and gpu.holds(self)
        return found.replace("torch.", "torch.cuda.") if named else found

    def is_pinned(self: torch.Tensor, device: Any = None) -> bool:
        return gpu.is_pinned(self)

    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        return self if is_pinned(self) else _to_copy(self, pin_memory=True)

    yield from (type, is_pinned, pin_memory)


def _resize(gpu: Gpu) -> Callable[..., Any]:
    real = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> None:
        real(self, size)
        gpu.resized(self)

    return resize_


def _read_by_host(gpu: Gpu, name: str) -> Callable[..., Any]:
    read = getattr(torch.Tensor, name)

    @functools.wraps(read)
    def checked(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if gpu.holds(self) and name != "tolist":
            gpu.fault(f"{name} of a CUDA tensor")
        if gpu.holds(self):
            gpu.finish_copies()
        elif "/megatron/" not in caller():  # its arrays of experts are made before it waits
            gpu.check_host(self, name, writes=False)
        return read(self, *args, **kwargs)

    return checked


def _factory(gpu: Gpu, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Of a function that makes a tensor from data where it is told to, or where the data is."""

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        device, pins = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
        if device is None and args and isinstance(args[0], torch.Tensor):
            device = args[0].device
        if not gpu.asked(device):
            result = make(*args, device=device, **kwargs)
            if pins:
                gpu.pin(result)
            return result
        if make.__name__ in ("as_tensor", "asarray") and isinstance(args[0], torch.Tensor):
            return make(*args, **kwargs).to(device)  # perhaps itself
        return gpu.take(make(*args, device=CPU, **kwargs))

    return made


def _with_numbered_device(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function that takes a number for a device, as it does where torch is built for CUDA."""

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if isinstance(device, int):
            kwargs["device"] = torch.device("cuda", device)
        return make(*args, **kwargs)

    return made


def _generator_class(gpu: Gpu) -> type:
    real = torch.Generator

    class Instances(type(real)):  # type: ignore[misc]
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, real)

    class Generator(real, metaclass=Instances):  # type: ignore[misc, valid-type]
        """A CPU generator that knows for which device it draws."""

        def __new__(cls, device: Any = "cpu") -> "Generator":
            on_gpu = gpu.asked(device)
            made: Generator = super().__new__(cls, CPU if on_gpu else device)
            if on_gpu:
                gpu.generators.add(made._cdata)
            return made

        @property
        def device(self) -> torch.device:
            return gpu.device if self._cdata in gpu.generators else CPU

    return Generator
