"""The terminal: `say` alone writes there. It may be closed, may not know a character, and would
obey some of what is written to it. And what is said where memory is lacking.
"""

import errno
import io
import logging
import os
import re
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from megatron_opsft.errors import first_line

_GONE = (errno.EPIPE, errno.EIO)  # nobody reads the pipe; the terminal was closed
# What moves the cursor, sets titles or colours, or turns the direction of writing; and halves of
# surrogate pairs, as of file names that are not UTF-8, which cannot be written at all.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
# Of the C library, of the loader and of Python, whichever asked for memory first.
_NO_SPACE = re.compile(
    "failed to map segment|Resource temporarily unavailable|annot allocate memory"
    "|can't allocate memory|can't start new thread|bad_alloc"
)

# Said by torch's allocator, CUDA, Triton, cuBLAS, cuDNN, NCCL, and vLLM's pool of memory (cuMem).
_GPU_IS_FULL = re.compile(
    r"CUDA (driver )?(error: |Error: )?out of memory|Triton Error \[CUDA\]: out of memory"
    "|Cuda failure .*out of memory|CU(BLAS|DNN)_STATUS_ALLOC_FAILED"
)
_OF_VLLM_POOL = "CUDA Error: "


def printable(text: str) -> str:
    """The text with every character that a terminal would obey as its escape: ESC as `\\x1b`.

    Tabs and line breaks stay.
    """
    return _UNSAFE.sub(
        lambda found: found[0].encode("unicode_escape").decode("ascii"), text
    )


def say(text: str, *, end: str = "\n", error: bool = False, dim: bool = False) -> None:
    """Write to standard output, or for an `error` to standard error, at once.

    Nobody needs to read it: a stream that was closed is no error. What the stream's encoding does
    not know, and what a terminal would obey, is written as an escape. dim: paler, on a terminal.
    Errors: `OSError`, such as of a full disk that it is redirected to.
    """
    stream = sys.stderr if error else sys.stdout
    if stream is None or getattr(stream, "closed", False):
        return
    shown = printable(text)
    if dim and stream.isatty():
        shown = f"\x1b[2m{shown}\x1b[0m"
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(
            (shown + end).encode(encoding, "backslashreplace").decode(encoding)
        )
        stream.flush()
    except OSError as failure:
        if failure.errno not in _GONE:
            raise


class LogToStderr(logging.StreamHandler[Any]):
    """Writes to what is `sys.stderr` at the moment: a bar on the terminal takes its place."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, which no terminal obeys."""
        return printable(super().format(record))

    def emit(self, record: logging.LogRecord) -> None:
        """A line above the bar, if there is one."""
        self.stream = sys.stderr
        super().emit(record)


class LastingStream:
    """A text stream that drops what is written when nobody can read it any more."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._lasting(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._lasting(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lasting(self, act: Callable[..., Any], *text: str) -> None:
        """Where nobody reads any more, all that this process writes there goes nowhere from here
        on; what libraries write too. Other errors, such as of a full disk, are raised.
        """
        try:
            act(*text)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            if self._stream is sys.__stdout__:
                say("standard output was closed: continuing without it", error=True)


def let_output_go_away() -> None:
    """For the whole process. Called once, at its start."""
    for name in ("stdin", "stdout", "stderr"):
        if (
            getattr(sys, name) is None
        ):  # closed from the beginning: a file would take its number
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):  # libraries write there, too
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):  # of a stream that is gone already
                stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = LastingStream(sys.stdout), LastingStream(sys.stderr)


def describe_full_gpu(error: BaseException) -> str:
    """The line which says that a GPU has no memory left, of this error or of one that led to it; ""
    for other errors.

    Told by type and text: torch is not imported here, and CUDA's, vLLM's and NCCL's errors are
    plain `RuntimeError`s.
    """
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        lines = [line for line in str(cause).splitlines() if _GPU_IS_FULL.search(line)]
        if type(cause).__name__ == "OutOfMemoryError":
            return first_line(cause)
        if isinstance(cause, RuntimeError) and lines:
            return f"{type(cause).__name__}: {lines[0].strip()}"
        # An error of another kind that came up on the way is a fault of its own.
        is_reaction = isinstance(cause, RuntimeError) and not cause.__suppress_context__
        cause = cause.__cause__ or (cause.__context__ if is_reaction else None)
    return ""


def is_of_waking_vllm(full_gpu: str) -> bool:
    """Whether vLLM's memory pool has said so, which happens when vLLM wakes up."""
    return _OF_VLLM_POOL in full_gpu


def lack_of_memory(error: BaseException) -> str | None:
    """What to change about the start, if an error comes from a limit of this process's memory."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    is_lack = isinstance(error, MemoryError) or _NO_SPACE.search(str(error))
    if limit == resource.RLIM_INFINITY or not is_lack:
        return None
    return (
        f"this process may have {limit >> 20} MiB of address space, which is too little "
        "(ulimit -v): raise the limit, or lift it with `ulimit -v unlimited`"
    )
