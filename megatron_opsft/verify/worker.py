"""The verifier's worker process: reads (text, gold) from stdin, writes verdicts to stdout, until
stdin ends.

Started by `worker_pool` through `main`. Messages are JSON behind a 4-byte big-endian length. The
parent keeps the time limit and kills; the worker takes care to die with its parent and not to eat
the machine's memory.
"""

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from importlib import import_module
from typing import Any, BinaryIO

_LENGTH = struct.Struct(">I")
_PR_SET_PDEATHSIG = 1


def write_message(stream: BinaryIO, message: Any) -> None:
    """Write one message and flush it; raises OSError when the other side is gone."""
    body = json.dumps(message).encode()
    stream.write(_LENGTH.pack(len(body)) + body)
    stream.flush()


def read_message(stream: BinaryIO) -> Any:
    """Read one message; EOFError when the other side is gone, also amid a message."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        raise EOFError
    (size,) = _LENGTH.unpack(header)
    body = stream.read(size)
    if len(body) < size:
        raise EOFError
    return json.loads(body)


def main(judge_name: str, max_memory_bytes: int, parent_pid: int) -> None:
    """Serve until stdin ends. `judge_name` is `module:function` of a (text, gold) -> Verdict."""
    _die_with_parent(parent_pid)
    os.nice(5)  # an engine that decodes at the same time comes first
    # A scheduler's or terminal's signal goes to the whole job: the parent decides when its workers
    # end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    requests = sys.stdin.buffer
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library's print must not mix with replies
    if max_memory_bytes and sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
    module_name, _, function_name = judge_name.partition(":")
    judge = getattr(import_module(module_name), function_name)
    judge(
        r"\boxed{\frac{1}{2}}", "0.5"
    )  # compiles patterns and parser tables before any clock runs
    try:
        write_message(replies, "ready")
        while True:
            text, gold = read_message(requests)
            verdict = judge(text, gold)
            write_message(replies, [verdict.outcome.value, verdict.answer, _address_space()])
    except (EOFError, BrokenPipeError):
        os._exit(0)  # skips flushing into a pipe that nobody reads
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
    """Have the kernel kill this process when its parent dies, even amid a long computation."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(0)  # it died before the request was made
