"""Real worker processes over gloo, started once and used by many tests.

Importing Megatron takes seconds, so the processes stay. Each job gets a process group of its own,
of any size up to the number of workers, and leaves it again. Like the trainer, a rank that failed
enters no collective any more: the whole world is killed then, and the next job starts a new one.
"""

import gc
import importlib
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from weakref import WeakSet

NUM_WORKERS = 4
_GRACE_SECONDS = 3.0
# vLLM is not among them: it changes the process it lives in.
IMPORTED_ONCE = [
    "megatron_opsft.session",
    "transformers.models.qwen2.modeling_qwen2",
    "torch._dynamo",
]


class JobFailed(AssertionError):
    """A rank raised; the message holds its traceback."""


class World:
    """`run` calls a function on the first `world_size` workers and returns the results by rank.

    `enter` and `inside` do the same in a context that stays, as a whole session of the trainer.
    """

    def __init__(self, num_workers: int = NUM_WORKERS) -> None:
        self._num_workers = num_workers
        self._workers: list[tuple[Any, Connection]] = []
        self._directory = tempfile.TemporaryDirectory()
        self._num_jobs = 0
        self._num_inside = 0  # ranks of the context that was entered
        self.entered: object = None

    def run(
        self, function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120
    ) -> list[Any]:
        """function: of a module, not nested; called as `function(*args)` inside a process group.

        Arguments and results are pickled. Errors: `JobFailed` when a rank raises or is late.
        """
        __tracebackhide__ = True
        self.leave()
        job = ("run", function, world_size, self._store(), args)
        return self._ask(world_size, job, timeout)

    def enter(self, name: object, context: Callable[..., Any], world_size: int, *args: Any) -> None:
        """`with context(*args)`, a tuple, inside a process group, until `leave` or another job.

        `entered` is the name until then, None otherwise: a job that failed ends the context too.
        """
        self.leave()
        self._ask(world_size, ("enter", context, world_size, self._store(), args), 120)
        self._num_inside, self.entered = world_size, name

    def inside(self, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
        """`function(*entered, *args)` on the ranks of the context; otherwise as `run`."""
        __tracebackhide__ = True
        return self._ask(self._num_inside, ("inside", function, args), timeout)

    def leave(self) -> None:
        """Leave the context, if any."""
        if self.entered is not None:
            self._ask(self._num_inside, ("leave",), 120)
            self._num_inside, self.entered = 0, None

    def _store(self) -> str:
        self._num_jobs += 1
        return str(Path(self._directory.name) / f"job{self._num_jobs}")

    def _ask(self, world_size: int, job: tuple[Any, ...], timeout: float) -> list[Any]:
        __tracebackhide__ = True
        if not self._workers:
            self._start()
        connections = [connection for _, connection in self._workers[:world_size]]
        for connection in connections:
            connection.send(job)
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
        # Forked from a process that has imported what all of them need.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED_ONCE)
        for rank in range(self._num_workers):
            here, there = context.Pipe()
            # Not a daemon: Megatron's checkpoint writer starts processes of its own.
            process = context.Process(target=_serve, args=(rank, there), daemon=False)
            process.start()
            there.close()
            self._workers.append((process, here))

    def stop(self) -> None:
        """Kill the workers; the next job starts new ones."""
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers = []
        self._num_inside, self.entered = 0, None


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
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    _note_dispatchers()
    gc.freeze()  # a collection after each job, and those of Megatron, pass over what is imported
    worker = _Worker(rank)
    while True:
        try:
            name, *job = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, getattr(worker, name)(*job))
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send(answer)


class _Worker:
    """The jobs, on one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._context = ExitStack()
        self._entered: tuple[Any, ...] = ()

    def run(
        self, function: Callable[..., Any], world_size: int, store: str, args: tuple[Any, ...]
    ) -> Any:
        with _process_group(self._rank, world_size, store):
            return function(*args)

    def enter(
        self, context: Callable[..., Any], world_size: int, store: str, args: tuple[Any, ...]
    ) -> None:
        self._context.enter_context(_process_group(self._rank, world_size, store))
        self._entered = self._context.enter_context(context(*args))

    def inside(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return function(*self._entered, *args)

    def leave(self) -> None:
        self._entered = ()
        self._context.close()


@contextmanager
def _process_group(rank: int, world_size: int, store: str) -> Iterator[None]:
    import torch.distributed as dist

    from megatron_opsft.runtime.distributed import stop_distributed

    os.environ["WORLD_SIZE"] = str(world_size)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
    )
    yield
    # Only after success, as the trainer: the other ranks may wait for ever.
    stop_distributed()
    for dispatcher in tuple(_dispatchers):
        dispatcher.__dict__.clear()
    # Models are in reference cycles and hold process groups, which hold some forty threads a job.
    gc.collect()


_dispatchers: WeakSet[Any] = WeakSet()
"""Megatron's expert layers keep the last graph, and that the model, from being collected."""


def _note_dispatchers() -> None:
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

    initialize = MoETokenDispatcher.__init__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        _dispatchers.add(self)
        initialize(self, *args, **kwargs)

    MoETokenDispatcher.__init__ = noted
