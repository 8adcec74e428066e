"""How far a piece of work is: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_LOOKS = 0.5


class Progress:
    """Use it in a `with`; several threads may call `advance` and `look`, and as often as they like.

    The bars are drawn by one `Live` display and never started themselves: a started one is drawn
    anew by every task that it is given, and that while it is being drawn.
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
        console: Console | None = None,
        period: float = 30.0,
    ) -> None:
        """done: of `total` before the start. read: gives what is done now and a few words about
        it; by default what `advance` was told, and how fast that was. words: an amount as text.
        console: standard error by default. period: seconds of the past by which a bar knows the
        time left.
        """
        self._label, self._total, self._words, self._shown = label, total, words, shown
        self._first = self._done = done
        self._read = read or self._own_count
        self._mutex = Lock()
        self._start = self._last_look = self._last_line = time.monotonic()
        self.console = console or Console(stderr=True)
        self._bars = bars(period)
        count = f"{words(done)}/{words(total)}"
        self._task = self._bars.add_task(label, total=total, completed=done, count=count, about="-")
        self._live: Live | None = None
        if shown and self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=10, get_renderable=self.view)

    def view(self) -> RenderableType:
        """What a terminal shows."""
        return Group(self._bars, *self._below())

    def _below(self) -> Sequence[RenderableType]:
        """What is shown below the bar."""
        return ()

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *unused: object) -> None:
        if self._shown:
            self._show(last=True)
        if self._live is not None:
            self._live.stop()

    def advance(self, number: int) -> None:
        """So much more is done."""
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
        if self._live is None and not last:
            if time.monotonic() - self._last_line < _SECONDS_BETWEEN_LINES:
                return
            self._last_line = time.monotonic()
        done, about = self._read()
        if self._live is not None:
            count = f"{self._words(done)}/{self._words(self._total)}"
            self._bars.update(self._task, completed=done, count=count, about=about)
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


def bars(period: float = 30.0) -> Bars:
    """Tasks have fields `count` and `about`. period: see `Progress`."""
    return Bars(
        TextColumn("{task.description}"),
        TextColumn("{task.fields[count]}"),
        BarColumn(),
        TextColumn("{task.fields[about]}, left"),
        TimeRemainingColumn(),
        speed_estimate_period=period,
    )


def in_words(num_bytes: float) -> str:
    """Such as `15.23 GB`, `3.4 MB` or `812 bytes`."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.2f} GB"
    if num_bytes >= 1e5:
        return f"{num_bytes / 1e6:.1f} MB"
    return f"{num_bytes:,.0f} bytes"
