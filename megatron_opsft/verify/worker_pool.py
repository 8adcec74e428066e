"""A pool of warm verifier processes with a wall-clock limit for each answer.

math-verify can hang in C code where no signal or exception reaches it, and can exhaust memory. So
every answer is judged in a worker process (`verify.worker`), which is killed and replaced when it
overruns or dies. The parent never forks itself: workers are fresh interpreters that import neither
torch nor CUDA, safe to start next to NCCL, gloo and vLLM threads.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Pipe
from queue import SimpleQueue
from typing import Any, Self

from megatron_opsft.errors import UserError
from megatron_opsft.records import Outcome, Verdict
from megatron_opsft.verify.worker import READY

START_SECONDS = 300.0  # a thousand ranks importing from one file system at once are slow
MAX_STARTS = 4  # in a row: whatever ends them, such as too little memory, lasts
# A scheduler's or terminal's signal goes to the whole job: the parent decides when workers end.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_BOOT = (
    "import gc, json, sys; gc.disable(); sys.path[:] = json.loads(sys.argv[1]); "
    "from megatron_opsft.verify.worker import main; "
    "main(sys.argv[2], *map(int, sys.argv[3:]))"
)
_Item = tuple[str, ...]


class VerifierPool:
    """Up to `num_workers` processes that judge answers; one starts when the pool is made.

    timeout_seconds: wall-clock limit of one answer, counted from when a warm worker gets it.
    judge: as of `verify.worker.open_judge`.
    answers_per_worker: another worker starts each time this many more were requested. One
    takes a second of a core and 100 MB, as much as the usual number.
    max_memory_bytes: address space of a worker (0: no limit); beyond it the answer is an ERROR or
    WRONG. sympy keeps what it has computed, so a worker that has filled half of it is replaced
    between answers.

    A thread of the pool starts, asks and replaces one worker, that of its index in `_workers`.
    """

    def __init__(
        self,
        num_workers: int,
        timeout_seconds: float,
        *,
        judge: str = "math",
        answers_per_worker: int = 32,
        max_memory_bytes: int = 1 << 30,
    ) -> None:
        if num_workers < 1:
            raise UserError(f"verify.workers: {num_workers} is too few; a pool needs at least 1")
        self._num_workers, self._timeout_seconds = num_workers, timeout_seconds
        self._judge, self._max_memory_bytes = judge, max_memory_bytes
        self._answers_per_worker, self._num_asked = answers_per_worker, 0
        self._lock = threading.Lock()
        self._closed = False
        self._tasks: SimpleQueue[tuple[_Item, Future[Verdict]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._workers: list[_Worker | None] = [None] * num_workers
        self._ready = self._add_worker()

    def wait_until_ready(self) -> None:
        """Errors: `UserError` when a worker cannot start, as with a judge that is not there."""
        self._ready.result()

    def score(self, items: Sequence[tuple[str, ...]]) -> list[Verdict]:
        """Judge (response text, gold) and what else the judge takes; verdicts in the order of the
        items.

        TIMEOUT: the limit passed; ERROR: the worker died over it, a fresh one too where that one
        had judged others before. Equal items are judged once.
        Raises UserError when a worker cannot start at all.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("this VerifierPool is closed")
            futures: dict[_Item, Future[Verdict]] = {item: Future() for item in items}
            for task in futures.items():
                self._tasks.put(task)
            self._num_asked += len(futures)
            wanted = 1 + self._num_asked // self._answers_per_worker
            while len(self._threads) < min(self._num_workers, wanted):
                self._add_worker()
            try:
                return [futures[item].result() for item in items]
            finally:  # after an exception nobody asks for the others
                for future in futures.values():
                    future.cancel()

    def close(self) -> None:
        """End all workers. The pool cannot be used again; closing twice is fine."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                if worker is not None:
                    worker.process.kill()
            for _ in self._threads:
                self._tasks.put(None)
            for thread in self._threads:
                thread.join()
            self._threads = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add_worker(self) -> Future["_Worker"]:
        """The future says when it is warm."""
        ready: Future[_Worker] = Future()
        arguments = (len(self._threads), ready)
        self._threads.append(threading.Thread(target=self._serve, args=arguments, daemon=True))
        self._threads[-1].start()
        return ready

    def _serve(self, index: int, ready: Future["_Worker"]) -> None:
        """What a thread does, until `close`."""
        # A process started by a thread that blocks signals is deaf to them from the beginning.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        _settle(ready, self._warm, index)
        while (task := self._tasks.get()) is not None:
            item, future = task
            if future.set_running_or_notify_cancel():
                _settle(future, self._judge_with, index, item)
        self._end(index)

    def _judge_with(self, index: int, item: _Item) -> Verdict:
        while True:
            worker = self._warm(index)
            try:
                worker.pipe.send(item)
            except OSError:  # its pipe is closed: it died while idle
                self._end(index)
                continue
            try:
                reply = worker.receive(self._timeout_seconds)
            except (EOFError, OSError):
                self._end(index)
                if worker.num_judged:  # it may have died of what earlier answers left behind
                    continue
                return Verdict(outcome=Outcome.ERROR)
            if reply is None:
                self._end(index)
                return Verdict(outcome=Outcome.TIMEOUT)
            outcome, answer, address_space = reply
            worker.num_judged += 1
            if 2 * address_space > self._max_memory_bytes > 0:
                self._end(index)
            return Verdict(outcome=Outcome(outcome), answer=answer)

    def _warm(self, index: int) -> "_Worker":
        """The worker that is there, or a new one. One that ends before it is ready is started
        again. Errors: `UserError` for one that is not ready in time or is one too many.
        """
        if worker := self._workers[index]:
            return worker
        for _ in range(MAX_STARTS):
            if self._closed:
                raise RuntimeError("this VerifierPool is closed")
            self._workers[index] = worker = _Worker(self._judge, self._max_memory_bytes)
            try:
                message = worker.receive(START_SECONDS)
            except (EOFError, OSError):  # it ended, but the exit code may take a moment
                message = ""
                with suppress(subprocess.TimeoutExpired):
                    worker.process.wait(timeout=10)
            if message == READY:
                return worker
            self._end(index)
            if message is None:
                raise UserError(
                    f"a verifier worker was not ready after {START_SECONDS:.0f} s: "
                    "is the file system of the Python environment overloaded?"
                )
            if message:
                raise UserError(message)
            code = worker.process.returncode
        raise UserError(
            f"{MAX_STARTS} verifier workers in a row ended with exit code {code} before they were "
            "ready; what they printed is above (-9: is there memory left? Lower verify.workers)"
        )

    def _end(self, index: int) -> None:
        """SIGKILL, reap and close; quiet when it is dead already."""
        worker, self._workers[index] = self._workers[index], None
        if worker is not None:
            worker.process.kill()
            worker.process.wait()
            worker.pipe.close()


def _settle(future: Future[Any], compute: Callable[..., Any], *arguments: Any) -> None:
    """Its result, or the error that whoever waits for it gets."""
    try:
        future.set_result(compute(*arguments))
    except Exception as error:
        future.set_exception(error)


class _Worker:
    """One process; `num_judged`: verdicts it gave."""

    def __init__(self, judge: str, max_memory_bytes: int) -> None:
        # The pipe's framing is multiprocessing's, the process is not: its children import the
        # parent's main module again and cannot be given an environment.
        self.pipe, theirs = Pipe()
        numbers = [max_memory_bytes, os.getpid(), theirs.fileno()]
        # As multiprocessing's spawn does: the child finds modules where the parent found them.
        arguments = [_BOOT, json.dumps(sys.path), judge, *map(str, numbers)]
        # A fixed hash seed: the order of sympy's sets must not differ between workers.
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a library prints is not output of this program
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        self.num_judged = 0

    def receive(self, seconds: float) -> Any:
        """Its next message, None where that comes too late. Errors: `EOFError` or `OSError` where
        it has died.
        """
        return self.pipe.recv() if self.pipe.poll(seconds) else None
