"""Bytes done, rate and time left: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from threading import Lock
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress

_SECONDS_BETWEEN_LINES = 10.0


def in_words(num_bytes: float) -> str:
    """Such as `15.23 GB`, `3.4 MB` or `812 bytes`."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.2f} GB"
    if num_bytes >= 1e5:
        return f"{num_bytes / 1e6:.1f} MB"
    return f"{num_bytes:,.0f} bytes"


class Progress:
    """Context manager; `advance` may be called by several threads. Writes to standard error."""

    def __init__(self, label: str, total_bytes: int) -> None:
        self._label, self._total, self._done = label, total_bytes, 0
        self._mutex = Lock()
        self._started = self._last_line = time.monotonic()
        self._bar: RichProgress | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task(self._label, total=self._total)
        return self

    def advance(self, num_bytes: int) -> None:
        with self._mutex:
            self._done += num_bytes
            if self._bar is not None:
                self._bar.advance(self._task, num_bytes)
            elif time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
                self._last_line = time.monotonic()
                rate = self._done / (self._last_line - self._started)
                left = (self._total - self._done) / max(rate, 1)
                print(
                    f"{self._label}: {in_words(self._done)} of {in_words(self._total)}, "
                    f"{in_words(rate)}/s, about {left:.0f} s left",
                    file=sys.stderr,
                    flush=True,
                )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
