"""The stage `environment`: GPUs, driver, versions, what can be imported, and the two ceilings that
speeds are compared with.
"""

import argparse
import importlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from proof.stage import publish

from megatron_opsft.errors import UserError
from megatron_opsft.runtime.device import (
    Device,
    check_compiler,
    has_fused_weight_gradient,
    select_device,
    why_no_gpu,
)
from megatron_opsft.runtime.libraries import installed_versions

# Those that a stage would fail on if they are there and broken. vLLM's own stages say it of vLLM.
IMPORTED = ("numpy", "pydantic", "psutil", "megatron.core", "transformers", "triton")


def cuda_versions() -> dict[str, str]:
    """Of the driver, and of what torch was built with."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver, *_ = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.split()
    return {
        "driver": driver,
        "cuda": str(torch.version.cuda),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "cudnn": str(torch.backends.cudnn.version()),
    }


def describe_gpu(index: int) -> dict[str, Any]:
    """One of those that torch sees; peers: the others whose memory it can address."""
    found = torch.cuda.get_device_properties(index)
    others = set(range(torch.cuda.device_count())) - {index}
    return {
        "name": found.name,
        "memory_bytes": found.total_memory,
        "compute_capability": f"{found.major}.{found.minor}",
        "num_multiprocessors": found.multi_processor_count,
        "peers": [o for o in sorted(others) if torch.cuda.can_device_access_peer(index, o)],
    }


def toolchain() -> tuple[dict[str, Any], dict[str, float], list[str]]:
    """What compiles and holds kernels on this node: details, free GB, and what is wrong."""
    include = Path(sysconfig.get_paths()["include"])
    details: dict[str, Any] = {x: shutil.which(x) or "" for x in ("gcc", "nvcc", "ninja")}
    details["Python.h"] = (include / "Python.h").is_file()
    cache = details["NODE_CACHE"] = os.environ.get("NODE_CACHE") or "/tmp"
    there = next(folder for folder in (Path(cache), *Path(cache).parents) if folder.exists())
    # Docker gives /dev/shm 64 MB; NCCL and vLLM's ranks meet there.
    shm_gb, cache_gb = (shutil.disk_usage(x).free / 1e9 for x in ("/dev/shm", there))
    problems = [f"/dev/shm has {shm_gb:.2f} GB; give the container --shm-size=16g"] * (shm_gb < 1)
    if cache_gb < 5:
        problems.append(
            f"{cache} has {cache_gb:.1f} GB; set NODE_CACHE to a disk with 5 GB or more"
        )
    return details, {"shm_gb": shm_gb, "cache_gb": cache_gb}, problems


def import_problem(module: str) -> str:
    """Why a package that is there cannot be imported; empty where it can, or is not there."""
    if importlib.util.find_spec(module.split(".")[0]) is None:
        return ""
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"{module} is installed but cannot be imported: {type(error).__name__}: {error}"
    return ""


def fastest_seconds(device: Device, act: Callable[[], Any], repeats: int = 10) -> float:
    """The shortest of some repeats, after one that is not counted."""
    seconds = []
    for _ in range(repeats + 1):
        device.synchronize()
        started = time.perf_counter()
        act()
        device.synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def ceilings(device: Device) -> dict[str, float]:
    """bfloat16 products (TFLOP/s) and copies (GB/s, read and written) of random values."""
    size, count = (8192, 2**29) if device.is_cuda else (256, 2**22)
    factor = torch.randn(size, size, device=device.torch_device, dtype=torch.bfloat16)
    product = torch.empty_like(factor)
    source = torch.randn(count, device=device.torch_device)
    target = torch.empty_like(source)
    multiplying = fastest_seconds(device, lambda: torch.mm(factor, factor, out=product))
    copying = fastest_seconds(device, lambda: target.copy_(source))
    return {
        "matmul_tflops": 2 * size**3 / multiplying / 1e12,
        "copy_gb_per_second": 2 * source.numel() * source.itemsize / copying / 1e9,
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    args = parser.parse_args()
    is_cuda = args.device == "cuda" and torch.cuda.is_available()
    gpus = [describe_gpu(index) for index in range(torch.cuda.device_count())] if is_cuda else []
    figures: dict[str, float] = {"gpus": len(gpus)}
    if gpus:
        figures["gpu_memory_gb"] = min(gpu["memory_bytes"] for gpu in gpus) / 1e9
    problems: list[str] = []
    if gpus or args.device == "cpu":
        figures |= ceilings(select_device(args.device))
        # On a CPU TransformerEngine must not be imported, and is not asked for.
        modules = (*IMPORTED, "transformer_engine.pytorch") if gpus else IMPORTED
        problems = [problem for module in modules if (problem := import_problem(module))]
    tools, free, lacks = toolchain()
    figures |= free
    if gpus:
        problems += lacks
        try:
            check_compiler(select_device("cuda"))
        except UserError as error:
            problems.append(str(error))
    details = {
        "no_gpu": "" if gpus or args.device == "cpu" else why_no_gpu(),
        "tools": tools,
        "gpu_names": [gpu["name"] for gpu in gpus],
        "gpus": gpus,
        "versions": installed_versions() | (cuda_versions() if gpus else {}),
        "apex": has_fused_weight_gradient(),
        "system": platform.platform(),
    }
    publish(figures, problems, details)


if __name__ == "__main__":
    main()
