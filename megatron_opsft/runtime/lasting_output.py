"""Standard output and error that may go away: a closed pipe or terminal ends no run."""

import errno
import os
import sys
from typing import Any

_GONE = (errno.EPIPE, errno.EIO)  # nobody reads the pipe; the terminal was closed


class LastingStream:
    """A text stream that drops what is written when nobody can read it any more."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _drop(self, error: OSError) -> None:
        """From here on all that this process writes there goes nowhere; what libraries write too.

        Errors: any other than that nobody reads, such as a full disk.
        """
        if error.errno not in _GONE:
            raise error
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())
        if self._stream is sys.__stdout__:
            print("nobody reads standard output any more: this goes on without it", file=sys.stderr)


def let_output_go_away() -> None:
    """For the whole process. Called once, at its start."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed from the beginning: a file would take its number
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    sys.stdout, sys.stderr = LastingStream(sys.stdout), LastingStream(sys.stderr)
