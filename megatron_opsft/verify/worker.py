"""The verifier's worker process, and the judge that it loads: mathematics, or a user's function.

It receives a number with (text, gold) and what else its judge takes, and sends the number with the
verdict, until its parent closes the pipe. The parent keeps the time limit and kills; the worker
takes care to die with its parent and not to eat the machine's memory.
"""

import gc
import json
import math
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
from megatron_opsft.runtime.parent import end_with_parent

READY = "ready"
# Of its memory a worker may have filled this much when it is ready, or it could not judge much.
MAX_SHARE_AT_START = 0.75
MAX_ANSWER_CHARS = 500  # of the answer kept in a verdict, for the log
Judge = Callable[..., Verdict]


def main(
    judge_name: str,
    max_memory_bytes: int,
    memory_key: str,
    parent_pid: int,
    pipe_fd: int,
) -> None:
    """Serve until the pipe ends.

    judge_name: as of `open_judge`. max_memory_bytes: of address space, the judge's imports
    included. memory_key: what errors call it.

    Libraries keep what they have computed, as sympy does. So a worker that has filled half of what
    its imports left ends between two answers, and a fresh one takes its place.
    """
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(0)  # it died before the request was made
    os.nice(5)  # an engine that decodes at the same time comes first
    pipe: Connection = Connection(pipe_fd)
    try:
        judge = open_judge(judge_name)
        at_start = _address_space()
        _check_room(judge_name, at_start, max_memory_bytes, memory_key)
    except UserError as error:
        pipe.send((0, str(error)))
        os._exit(2)
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
    gc.freeze()  # what a judge imports stays
    own_pid = os.getpid()
    with suppress(
        EOFError, OSError, MemoryError
    ):  # the parent has gone, or asks a fresh worker
        pipe.send((0, READY))
        is_full = False
        while not is_full:
            number, item = pipe.recv()
            verdict = judge(*item)
            if os.getpid() != own_pid:
                os._exit(
                    0
                )  # a copy of the worker, which the judge has forked and let return
            pipe.send((number, verdict))
            is_full = 2 * (_address_space() - at_start) > max_memory_bytes - at_start
    os._exit(0)


def _check_room(
    judge_name: str, at_start: int, max_memory_bytes: int, memory_key: str
) -> None:
    """Errors: `UserError` for a judge whose imports leave too little of the memory."""
    if at_start > MAX_SHARE_AT_START * max_memory_bytes:
        raise UserError(
            f"judge {judge_name}: what it imports takes {at_start / 2**30:.2g} GiB, and a worker "
            f"has {memory_key}={max_memory_bytes / 2**30:g}; set {memory_key}="
            f"{math.ceil(2 * at_start / 2**30)}"
        )


def _address_space() -> int:
    """Bytes of this process's, which its limit counts; 0 where the system does not say."""
    with suppress(OSError):
        return (
            int(Path("/proc/self/statm").read_text().split()[0])
            * resource.getpagesize()
        )
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
        function(
            r"\boxed{\frac{1}{2}}", "0.5"
        )  # compiles patterns before any clock runs

    def judge(text: str, gold: str, fields: str = "{}") -> Verdict:
        try:
            columns = [json.loads(fields)] if ":" in name else []
            return _as_verdict(function(text, gold, *columns))
        except MemoryError:
            raise
        except (
            Exception
        ) as error:  # foreign output, foreign code: what breaks is the outcome
            return Verdict(outcome=Outcome.ERROR, answer=_kept(first_line(error)))

    return judge


def _import_function(name: str) -> Callable[..., Any]:
    """`package.module:function`, of Python's path or the working directory."""
    module_name, _, function_name = name.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # last: nothing that lies there hides a package
    try:
        module = import_module(module_name)
    except (
        Exception,
        SystemExit,
    ) as error:  # a user's code: whatever it breaks is said
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
    if isinstance(value, float) and not math.isfinite(value):
        raise TypeError(f"it returned {value}, which is neither right nor wrong")
    if isinstance(value, bool | int | float):
        return Verdict(outcome=Outcome.CORRECT if value > 0.5 else Outcome.WRONG)
    raise TypeError(
        f"it returned {type(value).__name__}, not a bool, a number, an Outcome or a Verdict"
    )
