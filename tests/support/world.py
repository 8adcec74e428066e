"""Real worker processes over gloo, started once for a file of tests.

A job that needs more of them starts them.
Each job gets a process group of its own and leaves it again. Like the trainer, a rank that failed
enters no collective any more: the whole world is killed then, and the next job starts a new one.
"""

import gc
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

from forked_cli import FORKS

_GRACE_SECONDS = 3.0


class World:
    """`run` calls a function on the first `world_size` workers and returns the results by rank.

    `enter` and `inside` do the same in a context that stays, as a whole session of the trainer.
    """

    def __init__(self) -> None:
        self._workers: list[ProcessPoolExecutor] = []  # of one process each
        self._directory = tempfile.TemporaryDirectory()
        self._num_jobs = 0
        self._num_inside = 0  # ranks of the context that was entered
        self.entered: object = None

    def run(
        self, function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120
    ) -> list[Any]:
        """function: of a module, not nested; called as `function(*args)` inside a process group.

        Arguments and results are pickled. Errors: AssertionError with the tracebacks of the ranks
        that raise, and the numbers of those that are late.
        """
        __tracebackhide__ = True
        self.leave()
        return self._ask(world_size, timeout, _run, self._store(world_size), function, args)

    def enter(self, name: object, context: Callable[..., Any], world_size: int, *args: Any) -> None:
        """`with context(*args)`, a tuple, inside a process group, until `leave` or another job.

        `entered` is the name until then, None otherwise: a job that failed ends the context too.
        """
        self.leave()
        self._ask(world_size, 120, _enter, self._store(world_size), context, args)
        self._num_inside, self.entered = world_size, name

    def inside(self, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
        """`function(*entered, *args)` on the ranks of the context; otherwise as `run`."""
        __tracebackhide__ = True
        return self._ask(self._num_inside, timeout, _inside, function, args)

    def leave(self) -> None:
        """Leave the context, if any."""
        if self.entered is not None:
            self._ask(self._num_inside, 120, _leave)
            self.entered = None

    def _store(self, world_size: int) -> tuple[str, int]:
        self._num_jobs += 1
        return str(Path(self._directory.name) / f"job{self._num_jobs}"), world_size

    def _ask(
        self, world_size: int, timeout: float, act: Callable[..., Any], *args: Any
    ) -> list[Any]:
        __tracebackhide__ = True
        while len(self._workers) < world_size:
            rank = len(self._workers)
            self._workers.append(
                ProcessPoolExecutor(1, FORKS, initializer=_start, initargs=(rank,))
            )
        jobs = [worker.submit(_answer, act, args) for worker in self._workers[:world_size]]
        if wait(jobs, timeout, FIRST_EXCEPTION).not_done:
            wait(jobs, _GRACE_SECONDS)
        late = [rank for rank, job in enumerate(jobs) if not job.done()]
        errors = {rank: job.exception() for rank, job in enumerate(jobs) if rank not in late}
        failures = [f"rank {rank}: {error}" for rank, error in errors.items() if error]
        if failures or late:
            self.stop()
            raise AssertionError("\n".join([*failures, f"ranks that did not end: {late}"]))
        return [job.result() for job in jobs]

    def stop(self) -> None:
        """Kill the workers; the next job starts new ones."""
        for worker in self._workers:
            for process in worker._processes.values():
                process.kill()
            worker.shutdown()
        self._workers = []
        self.entered = None


_rank = 0
_dispatchers: WeakSet[Any] = WeakSet()
_context = ExitStack()
_entered: tuple[Any, ...] = ()


def _start(rank: int) -> None:
    """In a new worker."""
    warnings.simplefilter("ignore")  # Megatron and torch deprecate much: four times each is noise
    import torch

    torch.set_num_threads(1)
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # as whoever joins a job has it
    from megatron_opsft.runtime import cpu_compat

    cpu_compat.install()
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

    make: Any = MoETokenDispatcher.__init__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        _dispatchers.add(self)
        make(self, *args, **kwargs)

    MoETokenDispatcher.__init__ = noted
    gc.freeze()  # a collection after each job, and those of Megatron, pass over what is imported
    global _rank
    _rank = rank


def _answer(act: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return act(*args)
    except BaseException:
        raise AssertionError(traceback.format_exc()) from None


def _run(store: tuple[str, int], function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with _process_group(*store):
        return function(*args)


def _enter(store: tuple[str, int], context: Callable[..., Any], args: tuple[Any, ...]) -> None:
    global _entered
    _context.enter_context(_process_group(*store))
    _entered = _context.enter_context(context(*args))


def _inside(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*_entered, *args)


def _leave() -> None:
    global _entered
    _entered = ()
    _context.close()


@contextmanager
def _process_group(store: str, world_size: int) -> Iterator[None]:
    import torch.distributed as dist

    from megatron_opsft.runtime.distributed import stop_distributed

    os.environ["WORLD_SIZE"] = str(world_size)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=_rank, world_size=world_size
    )
    yield
    # Only after success, as the trainer: the other ranks may wait for ever.
    stop_distributed()
    # Megatron's expert layers keep the last graph, and that the model, from being collected.
    for dispatcher in _dispatchers:
        dispatcher.__dict__.clear()
    # Models are in reference cycles and hold process groups, which hold some forty threads a job.
    gc.collect()
