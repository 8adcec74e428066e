"""What the benchmarks over several ranks share: starting, measuring, ending with one clear line."""

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from megatron_opsft.config import ParallelConfig
from megatron_opsft.errors import UserError
from megatron_opsft.plan.assumptions import load_hardware
from megatron_opsft.runtime.device import Device, PeakMemory, select_device
from megatron_opsft.runtime.distributed import Layout, gather_from_all, start_distributed


def rank_parser(doc: str | None, *, dtype: str, repeats: int) -> argparse.ArgumentParser:
    """The options that all these benchmarks have; dtype, repeats: their defaults."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=dtype)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--repeats", type=int, default=repeats)
    return parser


def start_ranks(count: int) -> None:
    """Become torchrun with `count` processes of this very command; inside it nothing is to do."""
    if count > 1 and "WORLD_SIZE" not in os.environ:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
        torchrun += ["--nproc-per-node", str(count)]
        os.execv(sys.executable, [sys.executable, *torchrun, *sys.argv])


def join_ranks(device_name: str, parallel: ParallelConfig) -> tuple[Device, Layout]:
    """The device of this rank, and its place after all ranks have made Megatron's groups."""
    device = select_device(device_name)
    if not device.is_cuda:
        from megatron_opsft.runtime import cpu_compat

        cpu_compat.install()
    return device, start_distributed(device, parallel)


def measured(device: Device, act: Callable[[], Any]) -> tuple[float, int]:
    """Seconds of the slowest rank, and the extra memory of the rank that took most."""
    gather_from_all([0])
    device.synchronize()
    with PeakMemory(device) as peak:
        start = time.perf_counter()
        act()
        device.synchronize()
        elapsed = time.perf_counter() - start
    everyone = gather_from_all([(elapsed, peak.extra_bytes)])
    return max(seconds for seconds, _ in everyone), max(extra for _, extra in everyone)


def peak_flops(device: Device) -> float | None:
    """bfloat16 operations a second of this rank's GPU at most; None where no plan knows it."""
    name = torch.get_device_module().get_device_name().lower() if device.is_cuda else ""
    models = ("h100", "h200", "a100", "b200")
    return next((load_hardware(m).peak_flops for m in models if m in name), None)


def run_main(main: Callable[[], None]) -> None:
    """Bad input: one line on stderr and exit code 2."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
