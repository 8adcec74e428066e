"""The verifier's worker process: receives (text, gold) and what else its judge takes, sends
(outcome, answer, bytes of its address space), until its parent closes the pipe.

Started by `worker_pool` through `main`. The parent keeps the time limit and kills; the worker takes
care to die with its parent and not to eat the machine's memory.
"""

import ctypes
import gc
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection

from megatron_opsft.errors import UserError
from megatron_opsft.verify.judges import open_judge

READY = "ready"
_PR_SET_PDEATHSIG = 1


def main(judge_name: str, max_memory_bytes: int, parent_pid: int, pipe_fd: int) -> None:
    """Serve until the pipe ends. `judge_name`: as of `verify.judges.open_judge`."""
    _die_with_parent(parent_pid)
    os.nice(5)  # an engine that decodes at the same time comes first
    # A scheduler's or terminal's signal goes to the whole job: the parent decides when its workers
    # end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pipe: Connection = Connection(pipe_fd)
    if max_memory_bytes and sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
    try:
        judge = open_judge(judge_name)
    except UserError as error:
        pipe.send(str(error))
        os._exit(2)
    gc.freeze()  # what a judge imports stays; nothing has been collected while it was loaded
    gc.enable()
    try:
        pipe.send(READY)
        while True:
            verdict = judge(*pipe.recv())
            pipe.send((verdict.outcome.value, verdict.answer, _address_space()))
    except (EOFError, OSError):
        os._exit(0)  # the parent has gone
    except MemoryError:
        os._exit(1)  # the parent asks a fresh worker


def _address_space() -> int:
    """Bytes of this process's, which its limit counts; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies, even amid a long computation: to be
    exact, when the thread that started it ends.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(0)  # it died before the request was made
