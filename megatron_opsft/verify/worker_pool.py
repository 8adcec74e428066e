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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Pipe
from threading import get_ident
from time import monotonic
from typing import Any, Self

from megatron_opsft.errors import UserError
from megatron_opsft.records import Outcome, TextMarks, Verdict
from megatron_opsft.verify.worker import NO_MEMORY_EXIT_CODE, READY

# A thousand ranks importing from one file system at once are slow.
START_SECONDS = 300.0
# Workers that end in a row before they are ready: the cause, such as too little memory, lasts.
MAX_STARTS = 4
# A worker that has closed its pipe is about to end, and then has an exit code.
_EXIT_SECONDS = 5.0
# What ends a process that gets no more memory: the kernel, or the C code that asked for it.
_LACKS_MEMORY = (signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
# A scheduler's or terminal's signal goes to the whole job: the parent decides when workers end.
_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGHUP,
)
_BOOT = (
    "import json, sys; sys.path[:], arguments = json.loads(sys.argv[1]); "
    "from megatron_opsft.verify.worker import main; main(*arguments)"
)


class VerifierPool:
    """Up to `num_workers` processes that judge answers; the first starts when the pool is made, the
    others as soon as there are answers for them.

    timeout_seconds: wall-clock limit of one answer, counted from when a warm worker gets it.
    judge: the name of the judge, see `verify.worker.open_judge`.
    max_memory_bytes: address space of a worker, its judge's imports included; an answer that
    needs more is an ERROR or WRONG.
    memory_key: the config key of that limit, for errors.

    Each thread of the pool starts, asks and replaces a worker of its own.
    """

    def __init__(
        self,
        num_workers: int,
        timeout_seconds: float,
        *,
        judge: str = "math",
        max_memory_bytes: int = 1 << 30,
        memory_key: str = "verify.memory_gb",
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._memory = f"{memory_key}={max_memory_bytes / 2**30:g}"
        self._start_worker = partial(_Worker, judge, max_memory_bytes, memory_key)
        self._closed = False
        self._workers: dict[int, _Worker] = {}  # by the thread's identifier
        # A process started by a thread that blocks signals is deaf to them from the beginning.
        self._threads = ThreadPoolExecutor(
            num_workers,
            initializer=signal.pthread_sigmask,
            initargs=(signal.SIG_BLOCK, _SIGNALS),
        )
        self._ready = self._threads.submit(self._warm)

    def wait_until_ready(self) -> None:
        """Wait for the first worker. Errors: `UserError` if it cannot start."""
        self._ready.result()

    def judge(self, items: Sequence[tuple[str, ...]]) -> list[Verdict]:
        """Judge items, each the arguments of the judge: (response text, gold, ...).

        Returns verdicts in the order of the items; equal items are judged once.

        TIMEOUT: the limit passed. ERROR: the worker died of the item, and the verdict's answer says
        how; one that had judged others before may have died of those, so a fresh one tries again.
        Errors: `UserError` if no worker can start.
        """
        futures = {
            item: self._threads.submit(self._score, item)
            for item in dict.fromkeys(items)
        }
        try:
            return [futures[item].result() for item in items]
        finally:  # after an exception nobody waits for the remaining verdicts
            for future in futures.values():
                future.cancel()

    def close(self) -> None:
        """End all workers. The pool cannot be used again; closing twice is fine."""
        self._closed = True
        for worker in list(self._workers.values()):
            worker.kill()  # a thread that waits for it stops waiting
        self._threads.shutdown(cancel_futures=True)
        for thread in list(self._workers):
            self._end(thread)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _score(self, item: tuple[str, ...]) -> Verdict:
        """Judge an item in this thread's worker. If the worker dies and the item need not be the
        cause, ask a fresh one.
        """
        while True:
            worker = self._warm()
            try:
                verdict = worker.judge(item, self._timeout_seconds)
            except BrokenPipeError:  # it died while idle
                self._end(get_ident())
                continue
            except (EOFError, OSError):
                # It died of this item, or of the memory that earlier ones left filled.
                with suppress(subprocess.TimeoutExpired):
                    worker.process.wait(_EXIT_SECONDS)
                self._end(get_ident())
                if worker.num_asked != 1:
                    continue
                answer = _describe_end(worker.process.returncode, self._memory)
                return Verdict(outcome=Outcome.ERROR, answer=answer)
            if verdict is None:
                self._end(get_ident())
                return Verdict(outcome=Outcome.TIMEOUT)
            return verdict

    def _warm(self) -> "_Worker":
        """Return the worker of this thread, ready to judge; start one if it has none.

        Errors: `UserError` for a worker that is not ready in time, and after `MAX_STARTS` that
        ended before they were ready.
        """
        thread = get_ident()
        if thread in self._workers:
            return self._workers[thread]
        for _ in range(MAX_STARTS):
            if self._closed:
                raise RuntimeError("this VerifierPool is closed")
            worker = self._start_worker()
            self._workers[thread] = worker
            try:
                message = worker.receive(0, START_SECONDS)
            except (EOFError, OSError):  # it ended, but the exit code may take a moment
                message = ""
                with suppress(subprocess.TimeoutExpired):
                    worker.process.wait(timeout=10)
            if message == READY:
                return worker
            self._end(thread)
            if message is None:  # it came too late
                raise UserError(
                    f"a verifier worker was not ready after {START_SECONDS:.0f} s: "
                    "is the file system of the Python environment overloaded?"
                )
            if message:  # why the judge cannot be used, as `worker.main` says
                raise UserError(message)
        raise UserError(
            f"{MAX_STARTS} verifier workers in a row ended with exit code "
            f"{worker.process.returncode} before they were ready; what they printed is above "
            "(-9: is there memory left? Lower verify.workers)"
        )

    def _end(self, thread: int) -> None:
        """SIGKILL, reap and close the thread's worker."""
        worker = self._workers.pop(thread)
        worker.kill()
        worker.process.wait()
        worker.pipe.close()


def _describe_end(exit_code: int, memory: str) -> str:
    """Say how a worker ended that gave no verdict; of memory only if that can be the reason.

    exit_code: below 0 the number of a signal. memory: the key of its limit, with the value.
    """
    if exit_code == NO_MEMORY_EXIT_CODE:
        return f"it needs more memory than {memory}; raise that"
    if exit_code >= 0:
        return f"its process ended with exit code {exit_code} and without a verdict"
    number = -exit_code
    ended = f"its process was ended by signal {number} ({signal.strsignal(number)})"
    if number in _LACKS_MEMORY:
        ended += f"; if it needs more than {memory}, raise that"
    return ended


class _Worker:
    """One worker process, from the side of the parent."""

    num_asked: int
    """How many answers it was asked to judge; they are numbered from 1."""

    def __init__(self, judge: str, max_memory_bytes: int, memory_key: str) -> None:
        # The pipe's framing is multiprocessing's, the process is not: its children import the
        # parent's main module again and cannot be given an environment.
        self.pipe, theirs = Pipe()
        # As multiprocessing's spawn does: the child finds modules where the parent found them.
        pipe_fd = theirs.fileno()
        arguments = [judge, max_memory_bytes, memory_key, os.getpid(), pipe_fd]
        # A fixed hash seed: the order of sympy's sets must not differ between workers.
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, json.dumps([sys.path, arguments])],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a library prints is not output of this program
                pass_fds=[pipe_fd],
                env=environment,
                start_new_session=True,
            )
        self.num_asked = 0

    def judge(self, item: tuple[str, ...], seconds: float) -> Verdict | None:
        """Return the verdict; None if it comes too late. Errors: `BrokenPipeError` if the process
        had died before, `EOFError` or another `OSError` if the item kills it.
        """
        self.pipe.send((self.num_asked + 1, item))
        self.num_asked += 1
        verdict: Verdict | None = self.receive(self.num_asked, seconds)
        if verdict is None:
            return None
        return replace(verdict, marks=self._receive_marks(seconds))

    def _receive_marks(self, seconds: float) -> TextMarks | None:
        """Return the marks of the response that was judged last; None if they come too late or the
        worker dies of them, which then judges no more.
        """
        marks: TextMarks | None = None
        with suppress(EOFError, OSError):
            if self.pipe.poll(seconds):
                marks = self.receive(-self.num_asked, seconds)
            else:
                self.kill()
        return marks

    def kill(self) -> None:
        """Send SIGKILL to the process, and to those that its judge has forked."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def receive(self, number: int, seconds: float) -> Any:
        """Return its message of that number; None if it comes too late. Other messages come from a
        judge that has answered twice, and are ignored. Errors: `EOFError` or `OSError` if the
        process has died.
        """
        deadline = monotonic() + seconds
        while self.pipe.poll(max(0.0, deadline - monotonic())):
            message_number, message = self.pipe.recv()
            if message_number == number:
                return message
        return None
