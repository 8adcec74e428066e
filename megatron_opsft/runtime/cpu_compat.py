"""Lets Megatron-Core run on a CPU, though it names CUDA where any device would do.

Installed for device=cpu only, and only where torch has no GPU of its own in use; importing it
changes nothing. Every model, gradient buffer, schedule, optimizer and checkpoint it then runs is
Megatron's own. What changes:

- `device="cuda"` in a torch call means the CPU, `Tensor.cuda()` returns the tensor itself, and
  `Tensor.type()` says `torch.cuda.FloatTensor` (the distributed optimizer compares that string);
- `torch.cuda.current_device()` is the CPU, `synchronize` and streams do nothing;
- the random-state functions use the CPU generator;
- tensor-parallel ranks pad uneven rows before they gather or scatter them, since gloo needs equal
  sizes;
- token counts of expert-parallel ranks become NumPy arrays, which Megatron does only when it copies
  from a GPU.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch.utils._device import _device_constructors

stands_for_cuda = torch.device("cpu")


def _names_cuda(value: Any) -> bool:
    """True for "cuda", "cuda:1" and CUDA's torch.device."""
    if isinstance(value, str):
        return value == "cuda" or value.startswith("cuda:")
    return isinstance(value, torch.device) and value.type == "cuda"


def _on_cpu_instead(function: Callable) -> Callable:
    """Wrap a function that takes a `device`, so that CUDA means the CPU to it."""

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if kwargs and _names_cuda(kwargs.get("device")):
            kwargs["device"] = stands_for_cuda
        return function(*args, **kwargs)

    return wrapper


def _map_devices() -> None:
    """Wrap the functions and methods that put a tensor on a device, and no others: a torch mode
    that sees all calls would cost a small model a sixth of its time.
    """
    library: Any = torch
    constructors = {function.__name__ for function in _device_constructors()}
    # And zeros_like, ones_like, ...
    for name in constructors | {name for name in dir(torch) if name.endswith("_like")}:
        if hasattr(torch, name):
            setattr(library, name, _on_cpu_instead(getattr(torch, name)))
    tensor: Any = torch.Tensor
    for name in dir(tensor):
        if name.startswith("new_"):
            setattr(tensor, name, _on_cpu_instead(getattr(tensor, name)))
    move = _on_cpu_instead(tensor.to)
    original_type = tensor.type

    @wraps(tensor.to)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and _names_cuda(args[0]):
            args = (stands_for_cuda, *args[1:])
        return move(self, *args, **kwargs)

    @wraps(original_type)
    def type_of(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Do as `Tensor.type`; its name of a CPU's type becomes that of CUDA's."""
        result = original_type(self, *args, **kwargs)
        if isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    tensor.to = to
    tensor.type = type_of
    tensor.cuda = lambda self, *args, **kwargs: self


class _NoStream:
    """Replaces a CUDA stream and its events: on a CPU all work is done when a call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # `record_event` has to return an event: this object stands for it, too.
        self.wait_stream = self.synchronize = self.record_event = lambda *unused: self


def _with_uneven(equal: Callable, uneven: Callable) -> Callable:
    """Return a replacement for `equal`, a collective of Megatron's for equal sizes. Where sizes are
    given, it calls `uneven`, which pads the rows and uses the original.
    """

    def collective(
        rows: Any, group: Any, sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        """Call `equal` for equal sizes; `uneven` if each rank's number of rows is given."""
        if sizes is None or group.size() == 1:
            return equal(rows, group, None, use_global_buffer)
        return uneven(equal, rows, group, [int(size) for size in sizes])

    return collective


def _gather_padded(gather_equal: Callable, rows: Any, group: Any, sizes: Any) -> Any:
    """Return the rows of all ranks of the group. sizes: how many rows each rank has."""
    padded = _pad(rows, max(sizes))
    gathered = gather_equal(padded, group).view(group.size(), *padded.shape)
    return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)])


def _scatter_padded(scatter_equal: Callable, rows: Any, group: Any, sizes: Any) -> Any:
    """Return this rank's rows of the sum of all ranks' rows. sizes: how many each rank gets."""
    padded = torch.cat([_pad(part, max(sizes)) for part in rows.split(sizes)])
    return scatter_equal(padded, group)[: sizes[group.rank()]]


def _pad(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Pad with zeros to this many rows, at least one."""
    padded = rows.new_zeros(max(1, num_rows), *rows.shape[1:])
    padded[: len(rows)] = rows
    return padded


def _to_numpy_if_asked(
    tensor: Any, as_numpy: bool = False, record_stream: bool = False
) -> Any:
    """Replace Megatron's `maybe_move_tensor_to_cpu`; a tensor on the meta device stays there."""
    if as_numpy and torch.is_tensor(tensor) and tensor.device.type == "cpu":
        return tensor.numpy()
    return tensor


@cache
def install() -> None:
    """Let this process's torch use the CPU where Megatron asks for CUDA. Idempotent."""
    import megatron.core.tensor_parallel.random as megatron_random
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import token_dispatcher

    cuda: Any = torch.cuda
    cuda.current_device = lambda: stands_for_cuda
    cuda.synchronize = lambda *args: None
    cuda.empty_cache = lambda: None
    cuda.current_stream = cuda.default_stream = cuda.Stream = _NoStream
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda new_state, *args, **kwargs: torch.set_rng_state(
        new_state
    )
    # torch.manual_seed would seed other devices, too.
    cuda.manual_seed = torch.default_generator.manual_seed
    random: Any = megatron_random
    random._get_cuda_rng_state = cuda.get_rng_state
    random._set_cuda_rng_state = cuda.set_rng_state
    module: Any = mappings
    module._gather_along_first_dim = _with_uneven(
        module._gather_along_first_dim, _gather_padded
    )
    module._reduce_scatter_along_first_dim = _with_uneven(
        module._reduce_scatter_along_first_dim, _scatter_padded
    )
    dispatcher: Any = token_dispatcher
    dispatcher.maybe_move_tensor_to_cpu = _to_numpy_if_asked
    _map_devices()
