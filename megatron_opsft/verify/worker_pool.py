"""A pool of warm verifier processes with a wall-clock limit for each answer.

math-verify can hang in C code where no signal or exception reaches it, and can exhaust memory. So
every answer is judged in a worker process (`verify.worker`), which is killed and replaced when it
overruns or dies. The parent never forks itself: workers are fresh interpreters that import neither
torch nor CUDA, safe to start next to NCCL, gloo and vLLM threads.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Pipe, wait
from types import TracebackType
from typing import Self, cast

from megatron_opsft.errors import UserError
from megatron_opsft.records import Outcome, Verdict
from megatron_opsft.verify.worker import READY

START_SECONDS = 300.0  # a thousand ranks importing from one file system at once are slow
MAX_KILLED_STARTS = 3  # in a row: whatever kills them, such as too little memory, lasts
_BOOT = (
    "import gc, json, sys; gc.disable(); sys.path[:] = json.loads(sys.argv[1]); "
    "from megatron_opsft.verify.worker import main; "
    "main(sys.argv[2], *map(int, sys.argv[3:]))"
)


class _Worker:
    """One process; `task`: index of the item it judges; `deadline`: of that, or of its start;
    `num_judged`: verdicts it gave.
    """

    def __init__(self, judge: str, max_memory_bytes: int) -> None:
        # The pipe's framing is multiprocessing's, the process is not: its children import the
        # parent's main module again and cannot be given an environment.
        self.pipe, theirs = Pipe()
        numbers = [max_memory_bytes, os.getpid(), theirs.fileno()]
        # As multiprocessing's spawn does: the child finds modules where the parent found them.
        arguments = [_BOOT, json.dumps(sys.path), judge, *map(str, numbers)]
        # A fixed hash seed: the order of sympy's sets must not differ between workers.
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        with theirs, _signals_held():
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a library prints is no output of this program
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        self.ready = False
        self.task: int | None = None
        self.num_judged = 0
        self.deadline = time.monotonic() + START_SECONDS

    def kill(self) -> None:
        """SIGKILL, reap and close; quiet when it is dead already."""
        self.process.kill()
        self.process.wait()
        self.pipe.close()


class VerifierPool:
    """Up to `num_workers` processes that judge answers; one starts when the pool is made.

    timeout_seconds: wall-clock limit of one answer, counted from when a warm worker gets it.
    judge: as of `verify.judges.open_judge`.
    answers_per_worker: the next worker starts when so many more have been asked for; a start costs
    about as much as the usual number.
    max_memory_bytes: address space of a worker (0: no limit); beyond it the answer is an ERROR or
    WRONG. sympy keeps what it has computed, so a worker that has filled half of it is replaced
    between answers.
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
        self._timeout_seconds = timeout_seconds
        self._judge = judge
        self._max_memory_bytes = max_memory_bytes
        self._lock = threading.Lock()
        self._closed = False
        self._killed_starts = 0
        self._num_workers, self._answers_per_worker = num_workers, answers_per_worker
        self._num_asked = 0
        # The kernel kills a worker when the thread that started it ends (`worker`).
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="verifier")
        self._workers = [self._start()]

    def wait_until_ready(self) -> None:
        """Errors: `UserError` when a worker cannot start, as with a judge that is not there."""
        with self._lock:
            while not all(worker.ready for worker in self._workers):
                for slot, heard in self._wait():
                    self._receive(slot, heard, {}, deque())

    def score(self, items: Sequence[tuple[str, ...]]) -> list[Verdict]:
        """Judge (response text, gold) and what else the judge takes; verdicts in the order of the
        items.

        TIMEOUT: the limit passed; ERROR: the worker died over it, a fresh one too where that one
        had judged others before. Equal items are judged once.
        Raises UserError when a worker cannot start at all.
        """
        unique = list(dict.fromkeys(items))
        with self._lock:
            if self._closed:
                raise RuntimeError("this VerifierPool is closed")
            verdicts = dict(zip(unique, self._judge_all(unique), strict=True))
        return [verdicts[item] for item in items]

    def close(self) -> None:
        """End all workers. The pool cannot be used again; closing twice is fine."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.kill()
            self._workers = []
            self._starter.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> _Worker:
        return self._starter.submit(_Worker, self._judge, self._max_memory_bytes).result()

    def _grow(self, num_items: int) -> None:
        """So many answers more are asked for."""
        self._num_asked += num_items
        wanted = min(self._num_workers, 1 + self._num_asked // self._answers_per_worker)
        while len(self._workers) < wanted:
            self._workers.append(self._start())

    def _judge_all(self, items: list[tuple[str, ...]]) -> list[Verdict]:
        verdicts: dict[int, Verdict] = {}
        waiting = deque(range(len(items)))
        self._grow(len(items))
        try:
            for slot in range(len(self._workers)):
                self._feed(slot, waiting, items)
            while len(verdicts) < len(items):
                for slot, heard in self._wait():
                    self._receive(slot, heard, verdicts, waiting)
                    self._feed(slot, waiting, items)
        finally:
            # After an exception a busy worker would answer the next call with this call's verdict.
            for slot, worker in enumerate(self._workers):
                if worker.task is not None:
                    self._replace(slot)
        return [verdicts[index] for index in range(len(items))]

    def _feed(self, slot: int, waiting: deque[int], items: list[tuple[str, ...]]) -> None:
        """Give a free worker the next item; one that is found dead is replaced."""
        worker = self._workers[slot]
        if not worker.ready or worker.task is not None or not waiting:
            return
        try:
            worker.pipe.send(items[waiting[0]])
        except OSError:  # its pipe is closed: it died while idle
            self._replace(slot)
            return
        worker.task = waiting.popleft()
        worker.deadline = time.monotonic() + self._timeout_seconds

    def _wait(self) -> list[tuple[int, bool]]:
        """Sleep until workers reply, die or are overdue: (slot, whether it can be read)."""
        pending = [
            (slot, worker)
            for slot, worker in enumerate(self._workers)
            if worker.task is not None or not worker.ready
        ]
        patience = min(worker.deadline for _, worker in pending) - time.monotonic()
        readable = wait([worker.pipe for _, worker in pending], max(0.0, patience))
        now = time.monotonic()
        return [
            (slot, worker.pipe in readable)
            for slot, worker in pending
            if worker.pipe in readable or worker.deadline <= now
        ]

    def _receive(
        self, slot: int, heard: bool, verdicts: dict[int, Verdict], waiting: deque[int]
    ) -> None:
        """Take a worker's reply; replace one that is overdue (not heard), dead (end of file), or
        full.
        """
        worker = self._workers[slot]
        try:
            message = worker.pipe.recv() if heard else None
        except (EOFError, OSError):
            message = None
        if message is None and not worker.ready:
            self._start_again(slot, ended=heard)
            return
        if not worker.ready:
            if message != READY:
                raise UserError(message)
            worker.ready = True
            self._killed_starts = 0
            return
        task = cast(int, worker.task)
        worker.task = None
        if message is not None:
            outcome, answer, address_space = message
            verdicts[task] = Verdict(outcome=Outcome(outcome), answer=answer)
            worker.num_judged += 1
            if 2 * address_space > self._max_memory_bytes > 0:
                self._replace(slot)
            return
        if heard and worker.num_judged:
            waiting.appendleft(task)  # it may have died of what earlier answers left behind
        else:
            verdicts[task] = Verdict(outcome=Outcome.ERROR if heard else Outcome.TIMEOUT)
        self._replace(slot)

    def _start_again(self, slot: int, *, ended: bool) -> None:
        """Replace a worker that a signal killed before it was ready. Errors: `UserError` for one
        that ended by itself, was not ready in time, or is one too many.
        """
        worker = self._workers[slot]
        if ended:  # its pipe is closed, but the exit code may take a moment
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(timeout=10)
        self._killed_starts += 1
        code = worker.process.returncode
        if code is None or code >= 0 or self._killed_starts > MAX_KILLED_STARTS:
            worker.kill()
            raise _start_error(code if ended else None)
        self._replace(slot)

    def _replace(self, slot: int) -> None:
        self._workers[slot].kill()
        self._workers[slot] = self._start()


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """A process started here is deaf to a scheduler's signals from its first instruction on, also
    before it can ignore them itself. This process gets its own a moment later.
    """
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
    )
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_error(code: int | None) -> UserError:
    """code: how the worker ended; None where it did not."""
    if code is None:
        return UserError(
            f"a verifier worker was not ready after {START_SECONDS:.0f} s: "
            "is the file system of the Python environment overloaded?"
        )
    if code < 0:
        return UserError(
            f"signal {-code} has killed {MAX_KILLED_STARTS + 1} verifier workers in a row before "
            "they were ready: is there memory left? Lower verify.workers"
        )
    return UserError(
        f"a verifier worker ended with exit code {code} before it was ready; "
        "what it printed is above (`pip install math-verify` if that is missing)"
    )
