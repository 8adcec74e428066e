"""Every aten call, of forward and backward passes: which device its tensors are on, and whether
CUDA would run it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pretend_gpu.collectives import check_collective
from pretend_gpu.marks import CPU, Gpu, true_device

_BETWEEN_DEVICES = {"aten::copy_", "aten::_to_copy", "aten::_foreach_copy_"}
# Indices may be the CPU's.
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
# They wait for the GPU, because their result, or its size, is a matter of values.
_WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select"}
_WAITING |= {"aten::_unique2", "aten::unique_dim", "aten::is_nonzero"}
_WITHOUT_KERNEL = {"aten::empty", "aten::empty_like", "aten::empty_strided"}
_WITH_FLOAT32_RESULT = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
_HALVES = {torch.bfloat16, torch.float16}


def checking_new_threads(gpu: Gpu) -> Iterator[tuple[Any, str, Any]]:
    """A mode belongs to a thread: each new one gets its own."""
    start: Any = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def checked(thread: threading.Thread) -> None:
        with Checked(gpu):
            start(thread)

    yield threading.Thread, "_bootstrap_inner", checked


class Checked(TorchDispatchMode):
    """The mode under which all of a pretended GPU's operations run."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        gpu, kwargs, name = self.gpu, dict(kwargs or {}), func._schema.name
        tensors = _tensors((args, kwargs))
        if func.namespace == "c10d":
            self._check_copies(func, args, kwargs)
            check_collective(gpu, name, args, tensors)
            return func(*args, **kwargs)
        held = [gpu.holds(tensor) for tensor in tensors]
        on_gpu = self._place(name, kwargs, tensors, held)
        if name in _BETWEEN_DEVICES and len({*held, on_gpu}) > 1:  # in the order of the stream
            self._cross(name, args, kwargs)
        else:
            self._check_copies(func, args, kwargs)
        if name in _WAITING and on_gpu:
            gpu.finish_copies()
        if on_gpu and name not in _WITHOUT_KERNEL and not _is_view(func):
            gpu.raise_last_error()
        pins = kwargs.pop("pin_memory", False)
        given = kwargs.get("generator")
        if given is not None and (given._cdata in gpu.generators) != on_gpu:
            gpu.fault(f"{name}: the generator is of another device")
        draws = given is None and torch.Tag.nondeterministic_seeded in func.tags
        with self._drawing() if draws and on_gpu else nullcontext():
            if name in _WITH_FLOAT32_RESULT and "dtype" in func._overloadname:
                result = self._multiply(func, args, kwargs)
            else:
                result = func(*args, **kwargs)
        is_undecided = _inside_autograd() and all(gpu.of(each).is_undecided for each in tensors)
        for tensor in _tensors(result):
            if on_gpu:
                gpu.take(tensor)
            elif pins:
                gpu.pin(tensor)
            elif is_undecided:
                gpu.of(tensor).is_undecided = True
        return result

    def _place(
        self, name: str, kwargs: dict[str, Any], tensors: list[torch.Tensor], held: list[bool]
    ) -> bool:
        """Whether the result is on the GPU. `device` becomes what the call can really run with.

        held: which of the tensors are on the GPU.
        """
        asked = kwargs.get("device")
        if asked is not None:
            on_gpu = self.gpu.asked(asked)
            if on_gpu:
                kwargs["device"] = CPU
            elif any(held) and (_inside_autograd() or _is_implicit(name, kwargs)):
                on_gpu = True  # C++ means the device of the tensor that it looks at
            return on_gpu
        if name in _BETWEEN_DEVICES:
            return bool(held) and held[0]
        if any(held) and not all(held):
            loose = [tensor for tensor, on in zip(tensors, held, strict=True) if not on]
            self._check_loose(name, loose, is_indexed=name in _INDEXING and held[0])
        return any(held)

    def _check_loose(self, name: str, loose: list[torch.Tensor], *, is_indexed: bool) -> None:
        """Tensors of the CPU in an operation of the GPU: scalars may be, and indices."""
        for tensor in loose:
            if self.gpu.of(tensor).is_undecided:
                self.gpu.take(tensor)
            elif tensor.dim() and not is_indexed:
                self.gpu.fault(
                    f"{name}: a tensor {list(tensor.shape)} of the CPU with tensors of the GPU"
                )

    def _cross(self, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        """From one device to the other by `copy_`: asynchronous if that was asked for and the
        host's memory is pinned. `Tensor.to` sees to itself.
        """
        if name != "aten::copy_":
            return
        target, source = args[0], args[1]
        host = source if self.gpu.holds(target) else target
        asynchronous = kwargs.get("non_blocking", len(args) > 2 and args[2])
        if asynchronous and self.gpu.is_pinned(host):
            self.gpu.begin_copy(host, writes_host=host is target)
        else:
            self.gpu.finish_copies()

    def _check_copies(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Whether a call touches memory that a copy uses. Views touch none."""
        if not self.gpu.is_copying or _is_view(func):
            return
        schema = func._schema.arguments
        given = [*zip(schema, args, strict=False)]
        given += [(each, kwargs[each.name]) for each in schema if each.name in kwargs]
        for argument, value in given:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(value):
                self.gpu.check_host(tensor, func._schema.name, writes=writes)

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Inside, what is drawn without a generator comes from the GPU's."""
        of_cpu, of_gpu = torch.default_generator, self.gpu.generator
        state = of_cpu.get_state()
        of_cpu.set_state(of_gpu.get_state())
        yield
        of_gpu.set_state(of_cpu.get_state())
        of_cpu.set_state(state)

    def _multiply(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """GEMMs of bfloat16 with `out_dtype`, the accumulators, which only a GPU has."""
        names, name = [argument.name for argument in func._schema.arguments], func._schema.name
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        out_dtype, out = given.pop("out_dtype"), given.pop("out", None)
        *_, left, right = factors = [v for v in given.values() if isinstance(v, torch.Tensor)]
        if not all(map(self.gpu.holds, factors)):
            self.gpu.fault(f"{name} with out_dtype: only a GPU has it")
        dtypes = {left.dtype, right.dtype}
        if len(dtypes) > 1 or not dtypes <= _HALVES or out_dtype != torch.float32:
            self.gpu.fault(f"{name} of {dtypes} with a result in {out_dtype}")
        given |= {n: v.float() for n, v in given.items() if isinstance(v, torch.Tensor)}
        result = func.overloadpacket.default(**given)
        return result if out is None else out.copy_(result)


def _tensors(values: Any) -> list[torch.Tensor]:
    """Those that are the CPU's in truth."""
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in leaves if true_device(leaf).type == "cpu"]


def _is_view(func: Any) -> bool:
    returned = [each.alias_info for each in func._schema.returns]
    return bool(returned) and all(alias and not alias.is_write for alias in returned)


def _inside_autograd() -> bool:
    """Whether one of autograd's own formulas runs, none that is written in Python."""
    node = torch._C._current_autograd_node()
    return node is not None and "BackwardCFunction" not in str(type(node).__mro__)


def _is_implicit(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether only the dtype was asked for: `Tensor.to` says whether the memory is to be pinned."""
    return name == "aten::_to_copy" and kwargs.get("pin_memory") is None
