"""Process groups of a pretended GPU: Gloo does the work; what NCCL would refuse is refused."""

import functools
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from pretend_gpu.marks import Gpu

_backends: dict[str, str] = {}  # name of a group -> backend that was asked for
# Their tensor is made by C++, for nobody to read.
_WITHOUT_DATA = ("c10d::barrier", "c10d::monitored_barrier_")


def collective_stand_ins(gpu: Gpu) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, stand-in) of functions of torch.distributed."""
    object_device = distributed_c10d._get_object_coll_device

    def device_of_objects(group: Any = None) -> str:
        group = group or distributed_c10d._get_default_group()
        return "cuda" if _backend_of(group) == "nccl" else object_device(group)

    yield distributed_c10d, "_get_object_coll_device", device_of_objects
    for name in ("init_process_group", "new_group"):
        stand_in = _over_gloo(getattr(dist, name))
        yield dist, name, stand_in
        yield distributed_c10d, name, stand_in
    for name in ("isend", "irecv"):
        stand_in = _waitable_twice(getattr(dist, name))
        yield dist, name, stand_in
        yield distributed_c10d, name, stand_in


def _waitable_twice(real: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose work may be waited for again, as NCCL's: Gloo's waits for another message
    then.
    """

    @functools.wraps(real)
    def called(*args: Any, **kwargs: Any) -> Any:
        work = real(*args, **kwargs)
        return work and SimpleNamespace(wait=functools.cache(work.wait))

    return called


def _over_gloo(real: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes a group, which notes the backend and takes Gloo."""
    signature = inspect.signature(real)

    @functools.wraps(real)
    def made(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        asked = given.get("backend")
        given.pop("device_id", None)
        given.pop("pg_options", None)
        given["backend"] = "cpu:gloo,cuda:gloo"
        group = real(*bound.args, **bound.kwargs)
        is_member = group is not dist.GroupMember.NON_GROUP_MEMBER
        if is_member:
            group = group or dist.group.WORLD
            default = _backends.get(dist.group.WORLD.group_name, "cpu:gloo,cuda:nccl")
            _backends[group.group_name] = str(asked) if asked else default
        return None if real.__name__ == "init_process_group" else group

    return made


def _backend_of(group: Any) -> str:
    return _backends.get(group.group_name, "cpu:gloo,cuda:nccl")


def check_collective(gpu: Gpu, name: str, args: Any, tensors: list[torch.Tensor]) -> None:
    """Errors: `Fault` where the backend does not take these tensors."""
    (boxed, *_) = [a for a in args if isinstance(a, torch.ScriptObject)] or [None]
    if boxed is None or name in _WITHOUT_DATA:
        return
    backend = _backend_of(dist.ProcessGroup.unbox(boxed))
    held = {gpu.holds(tensor) for tensor in tensors}
    if False in held and backend == "nccl":
        gpu.fault(f"{name}: a CPU tensor in a group of NCCL alone")
    if True in held and backend == "gloo":
        gpu.fault(f"{name}: a CUDA tensor in a group of Gloo")
    if True in held and not all(tensor.is_contiguous() for tensor in tensors):
        gpu.fault(f"{name}: NCCL wants contiguous tensors")
