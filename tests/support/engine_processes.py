"""Processes of separate engines, as a test finds them."""

import contextlib
import os

import psutil


def engine_processes(pid: int | None = None) -> list[psutil.Process]:
    """Those that a process has started and that have not ended; pid: of it, None for this one."""
    found = []
    for process in psutil.Process(os.getpid() if pid is None else pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end while it is looked at
            if "megatron_opsft.rollout.remote" in str(process.cmdline()):
                found.append(process)
    return found
