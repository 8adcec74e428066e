"""Real worker processes over gloo, started once and used by many tests.

Importing Megatron takes seconds, so the processes stay. Each job gets a process group of its own,
of any size up to the number of workers, and leaves it again. Like the trainer, a rank that failed
enters no collective any more: the whole world is killed then, and the next job starts a new one.
"""

import gc
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

NUM_WORKERS = 4
_GRACE_SECONDS = 3.0
_MANY_THREADS = 40  # of a worker between jobs


class JobFailed(AssertionError):
    """A rank raised; the message holds its traceback."""


class World:
    """`run` calls a function on the first `world_size` workers and returns the results by rank."""

    def __init__(self, num_workers: int = NUM_WORKERS) -> None:
        self._num_workers = num_workers
        self._workers: list[tuple[Any, Connection]] = []
        self._directory = tempfile.TemporaryDirectory()
        self._num_jobs = 0

    def run(
        self, function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120
    ) -> list[Any]:
        """function: of a module, not nested; called as `function(*args)` inside a process group.

        Arguments and results are pickled. Errors: `JobFailed` when a rank raises or is late.
        """
        __tracebackhide__ = True
        if not self._workers:
            self._start()
        self._num_jobs += 1
        store = str(Path(self._directory.name) / f"job{self._num_jobs}")
        connections = [connection for _, connection in self._workers[:world_size]]
        for connection in connections:
            connection.send((function, world_size, store, args))
        results: dict[Connection, Any] = {}
        failures: list[str] = []
        deadline = time.monotonic() + timeout
        while len(results) + len(failures) < world_size and time.monotonic() < deadline:
            pending = [c for c in connections if c not in results]
            for connection in wait(pending, timeout=0.2):
                assert isinstance(connection, Connection)
                ok, value = _receive(connection)
                results[connection] = value
                if not ok:
                    failures.append(f"rank {connections.index(connection)}: {value}")
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            if failures and time.monotonic() > deadline:
                break
        if failures or len(results) < world_size:
            self.stop()
            late = [rank for rank, c in enumerate(connections) if c not in results]
            raise JobFailed("\n".join([*failures, f"ranks that did not end: {late}"]))
        return [results[connection] for connection in connections]

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in range(self._num_workers):
            here, there = context.Pipe()
            # Not a daemon: Megatron's checkpoint writer starts processes of its own.
            process = context.Process(target=_serve, args=(rank, there), daemon=False)
            process.start()
            there.close()
            self._workers.append((process, here))

    def stop(self) -> None:
        """Kill the workers; the next `run` starts new ones."""
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers = []


def _receive(connection: Connection) -> tuple[bool, Any]:
    try:
        return connection.recv()
    except EOFError:
        return False, "the process died"


def _serve(rank: int, connection: Connection) -> None:
    """A worker's life: jobs until the parent is gone."""
    warnings.simplefilter("ignore")  # Megatron and torch deprecate much: four times each is noise
    import torch

    torch.set_num_threads(1)
    from megatron_opsft.runtime import cpu_compat

    cpu_compat.install()
    while True:
        try:
            function, world_size, store, args = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, _run_job(function, rank, world_size, store, args))
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send(answer)


def _run_job(
    function: Callable[..., Any], rank: int, world_size: int, store: str, args: tuple[Any, ...]
) -> Any:
    import torch.distributed as dist

    from megatron_opsft.runtime.distributed import stop_distributed

    os.environ["WORLD_SIZE"] = str(world_size)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
    )
    result = function(*args)
    stop_distributed()
    # Models are in reference cycles and hold process groups, which hold some forty threads a job.
    gc.collect()
    if len(os.listdir("/proc/self/task")) > _MANY_THREADS:
        _forget_experts()
        gc.collect()
    return result


def _forget_experts() -> None:
    """Megatron's expert layers keep the last graph, and that the model, from being collected."""
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

    for found in gc.get_objects():
        if isinstance(found, MoETokenDispatcher):
            found.__dict__.clear()
