"""What this machine's GPUs are, as torch and the driver tell it; nothing is allocated."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_opsft.runtime.device import Device

_DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. compute_capability: such as "9.0"; peers: the GPUs whose memory it can address."""

    name: str
    memory_bytes: int
    compute_capability: str
    num_multiprocessors: int
    peers: tuple[int, ...]


def list_gpus() -> list[Gpu]:
    """The GPUs that torch sees, in its order; empty without CUDA."""
    if not torch.cuda.is_available():
        return []
    count = torch.cuda.device_count()
    return [_describe(index, count) for index in range(count)]


def _describe(index: int, count: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    others = [other for other in range(count) if other != index]
    return Gpu(
        name=properties.name,
        memory_bytes=properties.total_memory,
        compute_capability=f"{properties.major}.{properties.minor}",
        num_multiprocessors=properties.multi_processor_count,
        peers=tuple(o for o in others if torch.cuda.can_device_access_peer(index, o)),
    )


def cuda_versions() -> dict[str, str]:
    """Versions of the driver and of what torch was built with; "none" for what is not there."""
    versions = {"driver": driver_version(), "cuda": torch.version.cuda or "none"}
    if torch.cuda.is_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        versions["cudnn"] = str(torch.backends.cudnn.version() or "none")
    return versions


def driver_version() -> str:
    """Version of NVIDIA's kernel driver, from nvidia-smi or the driver; "none" without either."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        ended = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        text = _DRIVER_FILE.read_text() if _DRIVER_FILE.exists() else ""
        found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
        return found[0] if found else "none"
    return ended.stdout.split("\n")[0].strip()


def free_gpu_bytes(device: Device) -> int:
    """Bytes of this rank's GPU that no process holds; 0 on a CPU."""
    return torch.cuda.mem_get_info()[0] if device.is_cuda else 0
