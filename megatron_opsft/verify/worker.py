"""The verifier's worker process, and the judge that it loads: mathematics, or a user's function.

It receives (text, gold) and what else its judge takes, and sends the verdict, until its parent
closes the pipe. The parent keeps the time limit and kills; the worker takes care to die with its
parent and not to eat the machine's memory.
"""

import ctypes
import gc
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError, first_line
from megatron_opsft.records import Outcome, Verdict

READY = "ready"
MAX_ANSWER_CHARS = 500  # of the answer kept in a verdict, for the log
_PR_SET_PDEATHSIG = 1
Judge = Callable[..., Verdict]


def main(judge_name: str, max_memory_bytes: int, parent_pid: int, pipe_fd: int) -> None:
    """Serve until the pipe ends. `judge_name`: as of `open_judge`.

    sympy keeps what it has computed, so a worker that has filled half of its memory ends between
    two answers, and a fresh one takes its place.
    """
    if sys.platform == "linux":
        # The kernel kills this process when its parent dies, even amid a long computation: to be
        # exact, when the thread that started it ends.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
    if os.getppid() != parent_pid:
        os._exit(0)  # it died before the request was made
    os.nice(5)  # an engine that decodes at the same time comes first
    pipe: Connection = Connection(pipe_fd)
    try:
        judge = open_judge(judge_name)
    except UserError as error:
        pipe.send(str(error))
        os._exit(2)
    gc.freeze()  # what a judge imports stays
    with suppress(EOFError, OSError, MemoryError):  # the parent has gone, or asks a fresh worker
        pipe.send(READY)
        is_full = False
        while not is_full:
            pipe.send(judge(*pipe.recv()))
            is_full = 2 * _address_space() > max_memory_bytes
    os._exit(0)


def _address_space() -> int:
    """Bytes of this process's, which its limit counts; 0 where the system does not say."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return 0


def open_judge(name: str) -> Judge:
    """The judge of that name, `math` or `package.module:function`, ready to be timed.

    It takes (text, gold, columns of the row as JSON); the last may be left out. Whatever goes wrong
    is an ERROR, but for MemoryError, which is perhaps of earlier answers: another process judges
    this one. Errors: `UserError` for a user's that cannot be imported.
    """
    if ":" in name:
        function = _import_function(name)
    else:  # alone imports sympy
        from megatron_opsft.verify import math_verifier

        function = math_verifier.judge
        function(r"\boxed{\frac{1}{2}}", "0.5")  # compiles patterns before any clock runs

    def judge(text: str, gold: str, fields: str = "{}") -> Verdict:
        try:
            columns = [json.loads(fields)] if ":" in name else []
            return _as_verdict(function(text, gold, *columns))
        except MemoryError:
            raise
        except Exception as error:  # foreign output, foreign code: what breaks is the outcome
            return Verdict(outcome=Outcome.ERROR, answer=_kept(first_line(error)))

    return judge


def _import_function(name: str) -> Callable[..., Any]:
    """`package.module:function`, of Python's path or the working directory."""
    module_name, _, function_name = name.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # last: nothing that lies there hides a package
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's code: whatever it breaks is said
        raise UserError(
            f"judge {name}: {module_name} cannot be imported ({first_line(error)}); it is looked "
            f"for in {here} and where Python finds modules (PYTHONPATH)"
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(
            f"judge {name}: {module.__file__} has no function {function_name}; write "
            "package.module:function"
        )
    return function


def _kept(text: str) -> str:
    """As much as is kept of it, without halves of surrogate pairs, which cannot be written."""
    return text[:MAX_ANSWER_CHARS].encode(errors="replace").decode()


def _as_verdict(value: object) -> Verdict:
    if isinstance(value, Verdict):
        return Verdict(outcome=Outcome(value.outcome), answer=_kept(str(value.answer)))
    if isinstance(value, Outcome):
        return Verdict(outcome=value)
    value = value.item() if hasattr(value, "item") else value  # of NumPy, of torch
    if isinstance(value, bool | int | float):
        return Verdict(outcome=Outcome.CORRECT if value > 0.5 else Outcome.WRONG)
    raise TypeError(
        f"it returned {type(value).__name__}, not a bool, a number, an Outcome or a Verdict"
    )
