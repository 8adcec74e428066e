"""The verifier's worker process, and the judge that it loads: mathematics, or a user's function.

It receives (number, arguments of its judge) and sends (number, verdict), then (-number, marks),
until its parent closes the pipe. The marks come second: no verdict waits for them or dies of them.
The parent keeps the time limit and kills; the worker takes care to die with its parent and not to
eat the machine's memory.
"""

import errno
import gc
import inspect
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing.connection import Connection
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any

from megatron_opsft.errors import UserError, first_line
from megatron_opsft.records import Outcome, TextMarks, Verdict
from megatron_opsft.runtime.parent import end_with_parent
from megatron_opsft.verify.overthinking import mark

READY = "ready"
# The exit code of a worker whose judge had no memory left.
NO_MEMORY_EXIT_CODE = errno.ENOMEM
# The share of its memory that a worker may have filled when it is ready: it needs some to judge.
MAX_SHARE_AT_START = 0.75
MAX_ANSWER_CHARS = 500  # of the answer in a verdict, which is for the log
Judge = Callable[..., Verdict]
Marker = Callable[[str, str, Verdict], TextMarks | None]


def main(
    judge_name: str,
    max_memory_bytes: int,
    memory_key: str,
    parent_pid: int,
    pipe_fd: int,
) -> None:
    """Serve until the pipe ends, as the main function of the process.

    judge_name: see `open_judge`.
    max_memory_bytes: limit of the address space, the judge's imports included.
    memory_key: the config key of that limit, for errors.
    parent_pid, pipe_fd: the process that started this one, and this end of its pipe.

    Libraries such as sympy remember what they have computed. So a worker that has filled half of
    the memory that its imports left ends between two answers, and a fresh one takes its place.
    """
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(0)  # the parent died before `end_with_parent` could notice
    os.nice(5)  # an engine that decodes at the same time comes first
    pipe: Connection = Connection(pipe_fd)
    try:
        judge = open_judge(judge_name)
        find_marks = open_marker(judge_name)
        bytes_at_start = _address_space_bytes()
        if bytes_at_start > MAX_SHARE_AT_START * max_memory_bytes:
            raise UserError(
                f"judge {judge_name}: what it imports takes {bytes_at_start / 2**30:.2g} GiB, and "
                f"a worker has {memory_key}={max_memory_bytes / 2**30:g}; set {memory_key}="
                f"{math.ceil(2 * bytes_at_start / 2**30)}"
            )
    except UserError as error:
        pipe.send((0, str(error)))
        os._exit(2)
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
    gc.freeze()  # the judge's imports are never garbage
    try:
        _serve(pipe, judge, find_marks, (bytes_at_start + max_memory_bytes) / 2)
    except MemoryError:  # the parent asks a fresh worker
        os._exit(NO_MEMORY_EXIT_CODE)
    os._exit(0)


def _serve(
    pipe: Connection, judge: Judge, find_marks: Marker, max_bytes: float
) -> None:
    """Judge the items of the pipe until the parent is gone or more than `max_bytes` are filled."""
    own_pid = os.getpid()
    # EOFError, OSError: the parent is gone.
    with suppress(EOFError, OSError):
        pipe.send((0, READY))
        while True:
            number, item = pipe.recv()
            verdict = judge(*item)
            # The judge has forked: its copy of the worker ends.
            if os.getpid() != own_pid:
                os._exit(0)
            pipe.send((number, verdict))
            text, gold, *_ = item
            pipe.send((-number, find_marks(text, gold, verdict)))
            if _address_space_bytes() > max_bytes:
                return


def _address_space_bytes() -> int:
    """Return the size of this process's address space; 0 on a system that does not say it."""
    with suppress(OSError):
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        return num_pages * resource.getpagesize()
    return 0


def open_judge(name: str) -> Judge:
    """Return the judge of that name, as `section.JudgeName` writes it, ready to be timed.

    The judge is called with (text, gold, the row's columns as JSON, by default none). Any error is
    an ERROR, except MemoryError: earlier answers may have filled the memory, so another process
    judges this one. Errors: `UserError` for a function of the user's that cannot be imported, or
    cannot be called as (text, gold, fields).
    """
    is_own_judge = ":" in name
    if is_own_judge:
        function = _import_function(name)
    else:
        from megatron_opsft.verify import math_verifier  # the only import of sympy

        function = math_verifier.judge
        # Compiles patterns before any clock runs.
        function(r"\boxed{\frac{1}{2}}", "0.5")

    def judge(text: str, gold: str, fields: str = "{}") -> Verdict:
        """Call the function, and make a verdict of what it returns or of its error."""
        try:
            columns = [json.loads(fields)] if is_own_judge else []
            return _as_verdict(function(text, gold, *columns))
        except MemoryError:
            raise
        # A user's code, which may call sys.exit, or sympy: the verdict says what broke.
        except (Exception, SystemExit) as error:
            answer = _shortened(first_line(error))
            if is_own_judge:
                answer += _shortened(_place_of(error, function))
            return Verdict(outcome=Outcome.ERROR, answer=answer)

    return judge


def open_marker(judge_name: str) -> Marker:
    """Return the function that finds the marks in (text, gold, verdict); see `overthinking.mark`.

    It returns None for a text that it fails at. A judge of the user's own judges whole responses:
    nobody can say where in one the first right answer stands.
    """
    is_right = None
    if ":" not in judge_name:
        from megatron_opsft.verify import math_verifier

        is_right = math_verifier.is_right

    def find_marks(text: str, gold: str, verdict: Verdict) -> TextMarks | None:
        try:
            return mark(text, gold, verdict, is_right)
        except MemoryError:
            raise
        except Exception:  # whatever sympy raises: the verdict stands without them
            return None

    return find_marks


def _import_function(name: str) -> Callable[..., Any]:
    """Import `package.module:function` from Python's path or the working directory, and
    `FILE.py:function` from that file, whose neighbours it may import.
    """
    module_name, _, function_name = name.rpartition(":")
    file = file_of_judge(name)
    directory = str(file.parent) if file else os.getcwd()
    if directory not in sys.path:
        sys.path.append(directory)  # last: nothing that lies there hides a package
    try:
        module = _import_file(file) if file else import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        places = f"{directory} and where Python finds modules (PYTHONPATH)"
        searched = "" if file else f"; it is looked for in {places}"
        raise UserError(
            f"judge {name}: {module_name} cannot be imported ({first_line(error)}){searched}"
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(
            f"judge {name}: {module.__file__} has no function {function_name}; write "
            "package.module:function, or FILE.py:function"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have none
        return function
    try:
        signature.bind("text", "gold", {})
    except TypeError as error:
        raise UserError(
            f"judge {name}: it is called as {function_name}(text, gold, fields), and takes "
            f"{signature} ({error})"
        ) from None
    return function


def file_of_judge(name: str) -> Path | None:
    """Return the file of a judge that is named `FILE.py:function`; None for any other name."""
    file = Path(name.rpartition(":")[0])
    return file.expanduser().absolute() if file.suffix == ".py" else None


def _import_file(file: Path) -> ModuleType:
    """Import a module from its file. It may have the name of another one, which it does not hide.

    Errors: whatever its code raises.
    """
    name = f"judge of {file}"
    spec = spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "the suffix is .py"
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _place_of(error: BaseException, function: Callable[..., Any]) -> str:
    """Return the line of a user's judge that an error passed last, as " (file.py:7)"; "" if it did
    not come from there. function: the judge, perhaps behind decorators or a partial.
    """
    plain = inspect.unwrap(getattr(function, "func", function))
    code = getattr(plain, "__code__", None) or getattr(
        type(plain).__call__, "__code__", None
    )
    if code is None:  # written in C
        return ""
    lines = [
        line
        for frame, line in walk_tb(error.__traceback__)
        if frame.f_code.co_filename == code.co_filename
    ]
    return f" ({Path(code.co_filename).name}:{lines[-1]})" if lines else ""


def _shortened(text: str) -> str:
    """Return the first characters, without halves of surrogate pairs, which cannot be written."""
    return text[:MAX_ANSWER_CHARS].encode(errors="replace").decode()


def _as_verdict(value: object) -> Verdict:
    """Make a verdict of whatever a judge returns. Errors: `TypeError`."""
    if isinstance(value, Verdict):
        answer = _shortened(str(value.answer))
        return Verdict(outcome=Outcome(value.outcome), answer=answer)
    if isinstance(value, Outcome):
        return Verdict(outcome=value)
    if hasattr(value, "item"):  # a number of NumPy or torch
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        raise TypeError(f"it returned {value}, which is neither right nor wrong")
    if isinstance(value, bool | int | float):
        return Verdict(outcome=Outcome.CORRECT if value > 0.5 else Outcome.WRONG)
    raise TypeError(
        f"it returned {type(value).__name__}, not a bool, a number, an Outcome or a Verdict"
    )
