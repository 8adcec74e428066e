"""Output to the terminal, all of it through `say`; and messages for errors of lacking memory.

The terminal may be closed, may lack a character, and would obey control characters in a text.
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

_CLOSED = (errno.EPIPE, errno.EIO)  # nobody reads the pipe; the terminal was closed
# Characters that move the cursor, set titles or colours, or turn the direction of writing; and
# halves of surrogate pairs (from file names that are not UTF-8), which cannot be written at all.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
# Messages of the C library, of the loader and of Python: any of them may ask for memory first.
_NO_SPACE = re.compile(
    "failed to map segment|Resource temporarily unavailable|annot allocate memory"
    "|can't allocate memory|can't start new thread|bad_alloc"
)

# Messages of torch's allocator, CUDA, Triton, cuBLAS, cuDNN, NCCL, and vLLM's memory pool (cuMem).
_GPU_IS_FULL = re.compile(
    r"CUDA (driver )?(error: |Error: )?out of memory|Triton Error \[CUDA\]: out of memory"
    "|Cuda failure .*out of memory|CU(BLAS|DNN)_STATUS_ALLOC_FAILED"
)
_VLLM_POOL_ERROR = "CUDA Error: "


def printable(text: str) -> str:
    """Write every character that a terminal would obey as its escape, such as ESC as `\\x1b`.

    Tabs and line breaks stay.
    """
    return _UNSAFE.sub(
        lambda match: match[0].encode("unicode_escape").decode("ascii"), text
    )


def say(text: str, *, end: str = "\n", error: bool = False, dim: bool = False) -> None:
    """Write to standard output at once, or to standard error for an `error`.

    A closed stream is no error. Characters that the stream's encoding lacks or that a terminal
    would obey are written as escapes. dim: in a paler colour, on a terminal.
    Errors: `OSError`, for example if the stream is redirected to a full disk.
    """
    stream = sys.stderr if error else sys.stdout
    if stream is None or getattr(stream, "closed", False):
        return
    shown = printable(text)
    if dim and stream.isatty():
        shown = f"\x1b[2m{shown}\x1b[0m"
    encoding = getattr(stream, "encoding", None) or "utf-8"
    encoded = (shown + end).encode(encoding, "backslashreplace")
    try:
        stream.write(encoded.decode(encoding))
        stream.flush()
    except OSError as failure:
        if failure.errno not in _CLOSED:
            raise


class LogToStderr(logging.StreamHandler[Any]):
    """Writes to the current `sys.stderr`, which a progress bar replaces for a while."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without characters that a terminal would obey."""
        return printable(super().format(record))

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line above the progress bar, if there is one."""
        self.stream = sys.stderr
        super().emit(record)


class LastingStream:
    """A text stream that drops all output once nobody can read it any more."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._call(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._call(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _call(self, method: Callable[..., Any], *text: str) -> None:
        """Call a method of the stream. If the stream is closed, drop from now on all that this
        process writes to it, libraries included. Other errors, such as a full disk, are raised.
        """
        try:
            method(*text)
        except OSError as error:
            if error.errno not in _CLOSED:
                raise
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            if self._stream is sys.__stdout__:
                say("standard output was closed: continuing without it", error=True)


def let_output_go_away() -> None:
    """Let this process continue when its output is closed. Called once, at its start."""
    # If a stream is closed from the beginning, the next opened file would take its number.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):  # libraries write there, too
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):  # the stream may be closed already
                stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = LastingStream(sys.stdout), LastingStream(sys.stderr)


def describe_full_gpu(error: BaseException) -> str:
    """Return the line of this error, or of one that caused it, which says that a GPU has no memory
    left; "" for other errors.

    Errors are recognised by type and text: torch is not imported here, and CUDA's, vLLM's and
    NCCL's errors are plain `RuntimeError`s.
    """
    cause: BaseException | None = error
    seen: set[int] = set()  # a chain of causes may lead back to its beginning
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if type(cause).__name__ == "OutOfMemoryError":
            return first_line(cause)
        lines = [line for line in str(cause).splitlines() if _GPU_IS_FULL.search(line)]
        if isinstance(cause, RuntimeError) and lines:
            return f"{type(cause).__name__}: {lines[0].strip()}"
        if cause.__cause__ is not None:
            cause = cause.__cause__
        elif isinstance(cause, RuntimeError) and not cause.__suppress_context__:
            cause = cause.__context__
        else:  # an error of another kind while the first was handled is a fault of its own
            break
    return ""


def is_of_waking_vllm(full_gpu: str) -> bool:
    """True if the line is of vLLM's memory pool, which fails when vLLM wakes up."""
    return _VLLM_POOL_ERROR in full_gpu


def lack_of_memory(error: BaseException) -> str | None:
    """Return the message for an error of a memory limit of this process; None for other errors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    lacks_memory = isinstance(error, MemoryError) or _NO_SPACE.search(str(error))
    if limit == resource.RLIM_INFINITY or not lacks_memory:
        return None
    return (
        f"this process may have {limit >> 20} MiB of address space, which is too little "
        "(ulimit -v): raise the limit, or lift it with `ulimit -v unlimited`"
    )
