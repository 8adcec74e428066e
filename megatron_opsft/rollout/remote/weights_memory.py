"""What weights go through on their way to the engine processes of this node."""

import logging
from functools import partial

from megatron_opsft.rollout.remote.buckets import NewMemory, cuda_memory, refusal
from megatron_opsft.rollout.remote.fleet import Fleet
from megatron_opsft.runtime.device import Device
from megatron_opsft.runtime.shared_memory import HostMemory

log = logging.getLogger("megatron_opsft")


def choose_memory(fleet: Fleet, device: Device, *, is_main: bool) -> NewMemory:
    """What weights go through: a GPU's memory where each engine was seen to read it; called by
    every rank.
    """
    if not device.is_cuda:
        return HostMemory
    on_gpu = cuda_memory(device.torch_device)
    reason = ""
    for number, client in fleet.living():
        with fleet.noting(number):
            read = partial(client.call, "read_shared")
            reason = reason or refusal(on_gpu, read)
    reason = fleet.why_dead() or reason
    fleet.replace_dead()
    if is_main:
        log.info(
            "weights go to separate engines through %s",
            f"host memory ({reason})" if reason else "GPU memory (CUDA IPC)",
        )
    return HostMemory if reason else on_gpu
