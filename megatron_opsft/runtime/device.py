"""The device a run uses, and the few things that differ between them."""

import os
from dataclasses import dataclass

import torch

from megatron_opsft.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Where this rank computes: `torch_device` for tensors, `backend` for process groups."""

    torch_device: torch.device
    backend: str

    @property
    def is_cuda(self) -> bool:
        return self.torch_device.type == "cuda"


def select_device(wanted: str) -> Device:
    """The device for `run.device` on this rank; CUDA ranks take the GPU of their LOCAL_RANK.

    Errors: `UserError` when cuda is asked for and there is none.
    """
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise UserError("run.device=cuda: torch sees no GPU; use run.device=auto or cpu")
    if wanted == "cpu" or not available:
        return Device(torch_device=torch.device("cpu"), backend="gloo")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(index)
    return Device(torch_device=torch.device("cuda", index), backend="cpu:gloo,cuda:nccl")


def synchronize(device: Device) -> None:
    """Wait for the device's queued work, so that a wall-clock time means something."""
    if device.is_cuda:
        torch.cuda.synchronize()


# Dense bfloat16 tensor cores, without sparsity: NVIDIA's data sheets of the SXM parts.
_PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}


def peak_flops(device: Device) -> float | None:
    """bfloat16 operations a second of this rank's GPU at most; None where that is not known."""
    if not device.is_cuda:
        return None
    name = torch.cuda.get_device_name()
    return next((peak for model, peak in _PEAK_FLOPS.items() if model in name), None)


def peak_memory_bytes(device: Device) -> int:
    """Peak bytes of the CUDA allocator on this rank since start; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() if device.is_cuda else 0


def has_transformer_engine(device: Device) -> bool:
    """Whether TransformerEngine can be imported; it cannot work without CUDA and raises there."""
    return transformer_engine_version(device) is not None


def transformer_engine_version(device: Device) -> tuple[int, int] | None:
    """(major, minor) of a TransformerEngine that can be imported, or None."""
    if not device.is_cuda:
        return None
    try:
        import transformer_engine
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, RuntimeError, OSError):
        return None
    major, minor = transformer_engine.__version__.split(".")[:2]
    return int(major), int(minor)


def has_fused_weight_gradient() -> bool:
    """Whether NVIDIA Apex's gradient-accumulation kernel is there."""
    try:
        import fused_weight_gradient_mlp_cuda  # noqa: F401
    except ImportError:
        return False
    return True
