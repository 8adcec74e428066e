"""Lets Megatron-Core run on a CPU: it names CUDA in places where any device would do.

Installed for device=cpu only, and only where torch has no GPU of its own in use; importing it
changes nothing. Every model, gradient buffer, schedule, optimizer and checkpoint it then runs is
Megatron's own. What changes:

- `device="cuda"` in a torch call means the CPU, `Tensor.cuda()` returns the tensor itself, and
  `Tensor.type()` says `torch.cuda.FloatTensor` (the distributed optimizer compares that string);
- `torch.cuda.current_device()` is the CPU, `synchronize` and streams do nothing;
- the random-state functions use the CPU generator;
- what tensor-parallel ranks have unequally many rows of is gathered and scattered in equal parts,
  since gloo can do no other;
- how many tokens go to which expert-parallel rank is handed on as an array, which Megatron makes of
  it on the way from a GPU alone.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.utils._device import _device_constructors

stands_for_cuda = torch.device("cpu")
_is_installed = False


def _names_cuda(value: Any) -> bool:
    if isinstance(value, str):
        return value == "cuda" or value.startswith("cuda:")
    return isinstance(value, torch.device) and value.type == "cuda"


def _somewhere_else(makes: Callable) -> Callable:
    """A function that takes a `device`; CUDA is what stands for it."""

    @wraps(makes)
    def made(*args: Any, **kwargs: Any) -> Any:
        if kwargs and _names_cuda(kwargs.get("device")):
            kwargs["device"] = stands_for_cuda
        return makes(*args, **kwargs)

    return made


def _map_devices() -> None:
    """In the functions and methods that put a tensor somewhere, and in them alone: a mode that sees
    all calls of torch would cost a small model a sixth of its time.
    """
    library: Any = torch
    makers = {maker.__name__ for maker in _device_constructors()}
    for name in makers | {name for name in dir(torch) if name.endswith("_like")}:
        if hasattr(torch, name):
            setattr(library, name, _somewhere_else(getattr(torch, name)))
    tensor: Any = torch.Tensor
    for name in dir(tensor):
        if name.startswith("new_"):
            setattr(tensor, name, _somewhere_else(getattr(tensor, name)))
    moved, kind = _somewhere_else(tensor.to), tensor.type

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and _names_cuda(args[0]):
            args = (stands_for_cuda, *args[1:])
        return moved(self, *args, **kwargs)

    def type_of(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = kind(self, *args, **kwargs)
        return (
            found.replace("torch.", "torch.cuda.", 1)
            if isinstance(found, str)
            else found
        )

    tensor.to, tensor.type = wraps(tensor.to)(to), wraps(kind)(type_of)
    tensor.cuda = lambda self, *args, **kwargs: self


class _NoStream:
    """Stands for a CUDA stream and its events: a CPU has one queue, and it is always done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.wait_stream = self.synchronize = self.record_event = lambda *unused: self


def _get_cpu_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_cpu_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(new_state)


def _gather_in_equal_parts(equal: Callable) -> Callable:
    """For Megatron's `_gather_along_first_dim`, which `equal` is."""

    def gather(
        part: Any, group: Any, sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if sizes is None or group.size() == 1:
            return equal(part, group, None, use_global_buffer)
        filled = _filled(part, int(max(sizes)))
        parts = equal(filled, group).view(group.size(), *filled.shape)
        return torch.cat([rows[:size] for rows, size in zip(parts, sizes, strict=True)])

    return gather


def _scatter_in_equal_parts(equal: Callable) -> Callable:
    """For Megatron's `_reduce_scatter_along_first_dim`, which `equal` is."""

    def scatter(
        whole: Any, group: Any, sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if sizes is None or group.size() == 1:
            return equal(whole, group, None, use_global_buffer)
        parts = whole.split([int(size) for size in sizes])
        filled = torch.cat([_filled(part, int(max(sizes))) for part in parts])
        return equal(filled, group)[: int(sizes[group.rank()])]

    return scatter


def _filled(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Padded with zeros to this many rows, at least one."""
    filled = rows.new_zeros(max(1, size), *rows.shape[1:])
    filled[: len(rows)] = rows
    return filled


def _there_already(
    tensor: Any, as_numpy: bool = False, record_stream: bool = False
) -> Any:
    """For Megatron's `maybe_move_tensor_to_cpu`; on the meta device there is nothing to hand on."""
    is_there = as_numpy and torch.is_tensor(tensor) and tensor.device.type == "cpu"
    return tensor.numpy() if is_there else tensor


def install() -> None:
    """Make this process's torch answer for the CPU where Megatron asks for CUDA. Idempotent."""
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    import megatron.core.tensor_parallel.random as megatron_random
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import token_dispatcher

    cuda: Any = torch.cuda
    cuda.current_device = lambda: stands_for_cuda
    cuda.synchronize = lambda *args: None
    cuda.empty_cache = lambda: None
    cuda.current_stream = cuda.default_stream = cuda.Stream = _NoStream
    cuda.get_rng_state, cuda.set_rng_state = _get_cpu_rng_state, _set_cpu_rng_state
    cuda.manual_seed = (
        torch.default_generator.manual_seed
    )  # torch's own seeds other devices too
    random: Any = megatron_random
    random._get_cuda_rng_state = _get_cpu_rng_state
    random._set_cuda_rng_state = _set_cpu_rng_state
    rows: Any = mappings
    rows._gather_along_first_dim = _gather_in_equal_parts(rows._gather_along_first_dim)
    rows._reduce_scatter_along_first_dim = _scatter_in_equal_parts(
        rows._reduce_scatter_along_first_dim
    )
    dispatcher: Any = token_dispatcher
    dispatcher.maybe_move_tensor_to_cpu = _there_already
    _map_devices()
