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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from proof.stage import publish
from torch.utils.benchmark import Timer

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


def free_space() -> tuple[dict[str, float], list[str]]:
    """Free GB where ranks meet and kernels are kept on this node, and what is too little."""
    # Docker gives /dev/shm 64 MB; NCCL and vLLM's ranks meet there. NODE_CACHE may not be made yet.
    cache = Path(os.environ.get("NODE_CACHE") or "/tmp")
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    wanted = {Path("/dev/shm"): 1.0, there: 5.0}
    free = {folder: shutil.disk_usage(folder).free / 1e9 for folder in wanted}
    problems = [
        f"{folder} has {free[folder]:.1f} GB free, wanted {gb:g}; give a container "
        "--shm-size=16g, and NODE_CACHE a larger disk of the node"
        for folder, gb in wanted.items()
        if free[folder] < gb
    ]
    return dict(zip(("shm_gb", "cache_gb"), free.values(), strict=True)), problems


def import_problem(module: str) -> str:
    """Why a package that is there cannot be imported; empty where it can, or is not there."""
    if importlib.util.find_spec(module.split(".")[0]) is None:
        return ""
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"{module} is installed but cannot be imported: {type(error).__name__}: {error}"
    return ""


def fastest_seconds(act: Callable[[], Any]) -> float:
    """The shortest of some repeats."""
    return min(Timer("act()", globals={"act": act}).blocked_autorange(min_run_time=0.3).times)


def ceilings(device: Device) -> dict[str, float]:
    """bfloat16 products (TFLOP/s) and copies (GB/s, read and written) of random values."""
    size, count = (8192, 2**29) if device.is_cuda else (256, 2**22)
    factor = torch.randn(size, size, device=device.torch_device, dtype=torch.bfloat16)
    product = torch.empty_like(factor)
    source = torch.randn(count, device=device.torch_device)
    target = torch.empty_like(source)
    multiplying = fastest_seconds(lambda: torch.mm(factor, factor, out=product))
    copying = fastest_seconds(lambda: target.copy_(source))
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
    indices = range(torch.cuda.device_count() if is_cuda else 0)
    gpus = [torch.cuda.get_device_properties(index) for index in indices]
    figures: dict[str, float] = {"gpus": len(gpus)}
    if gpus:
        figures["gpu_memory_gb"] = min(gpu.total_memory for gpu in gpus) / 1e9
    problems: list[str] = []
    if gpus or args.device == "cpu":
        figures |= ceilings(select_device(args.device))
        # On a CPU TransformerEngine must not be imported, and is not asked for.
        modules = (*IMPORTED, "transformer_engine.pytorch") if gpus else IMPORTED
        problems = [problem for module in modules if (problem := import_problem(module))]
    free, lacks = free_space()
    figures |= free
    if gpus:
        problems += lacks
        try:
            check_compiler(select_device("cuda"))
        except UserError as error:
            problems.append(str(error))
    details = {
        "tools": {tool: shutil.which(tool) or "" for tool in ("gcc", "nvcc", "ninja")}
        | {"Python.h": (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file()},
        "no_gpu": "" if gpus or args.device == "cpu" else why_no_gpu(),
        "gpus": [str(gpu) for gpu in gpus],
        "versions": installed_versions() | (cuda_versions() if gpus else {}),
        "apex": has_fused_weight_gradient(),
        "system": platform.platform(),
    }
    publish(figures, problems, details)


if __name__ == "__main__":
    main()
