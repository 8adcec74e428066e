"""How far a piece of work is: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable
from threading import Lock
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_LOOKS = 0.5


class Progress:
    """Use it in a `with`; several threads may call `advance` and `look`, and as often as they
    like.
    """

    def __init__(
        self,
        label: str,
        total: int,
        *,
        done: int = 0,
        read: Callable[[], tuple[int, str]] | None = None,
        words: Callable[[float], str] = "{:,.0f}".format,
        shown: bool = True,
    ) -> None:
        """done: of `total` before the start. read: gives what is done now and a few words about
        it; by default what `advance` was told, and how fast that was. words: an amount as text.
        """
        self._label, self._total, self._words, self._shown = label, total, words, shown
        self._first = self._done = done
        self._read = read or self._own_count
        self._mutex = Lock()
        self._start = self._last_look = self._last_line = time.monotonic()
        columns = [TextColumn(f"{{task.{name}}}") for name in ("description", "fields[count]")]
        about = TextColumn("{task.fields[about]}, left")
        self._bar = Bars(
            *columns, BarColumn(), about, TimeRemainingColumn(), console=Console(stderr=True)
        )
        self._is_drawn = shown and self._bar.console.is_terminal
        count = f"{words(done)}/{words(total)}"
        self._task = self._bar.add_task(label, total=total, completed=done, count=count, about="-")

    def __enter__(self) -> Self:
        if self._is_drawn:
            self._bar.start()
        return self

    def __exit__(self, *unused: object) -> None:
        if self._shown:
            self._show(last=True)
        if self._is_drawn:
            self._bar.stop()

    def advance(self, number: int) -> None:
        """Count this much more as done."""
        with self._mutex:
            self._done += number
        self.look()

    def look(self) -> None:
        """Show what is new, if it is time."""
        if self._shown and time.monotonic() - self._last_look > _SECONDS_BETWEEN_LOOKS:
            with self._mutex:
                self._last_look = time.monotonic()
                self._show()

    def _show(self, *, last: bool = False) -> None:
        if not (self._is_drawn or last):
            if time.monotonic() - self._last_line < _SECONDS_BETWEEN_LINES:
                return
            self._last_line = time.monotonic()
        done, about = self._read()
        if self._is_drawn:
            count = f"{self._words(done)}/{self._words(self._total)}"
            self._bar.update(self._task, completed=done, count=count, about=about)
        else:
            print(self._line(done, about), file=sys.stderr, flush=True)

    def _line(self, done: int, about: str) -> str:
        """Such as `model: 512 of 4,096 samples, 91.2 % correct, about 80 s left`."""
        line = f"{self._label}: {self._words(done)} of {self._words(self._total)} {about}".rstrip()
        if self._first < done < self._total:
            each = (time.monotonic() - self._start) / (done - self._first)
            line += f", about {each * (self._total - done):,.0f} s left"
        return line

    def _own_count(self) -> tuple[int, str]:
        rate = (self._done - self._first) / max(time.monotonic() - self._start, 1e-9)
        return self._done, f"({self._words(rate)}/s)"


def in_words(num_bytes: float) -> str:
    """Such as `15.23 GB`, `3.4 MB` or `812 bytes`."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.2f} GB"
    if num_bytes >= 1e5:
        return f"{num_bytes / 1e6:.1f} MB"
    return f"{num_bytes:,.0f} bytes"
