"""Progress of a piece of work: tqdm's bar on a terminal, elsewhere its lines at intervals."""

import sys
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from megatron_opsft.runtime.console import say


class Progress(tqdm):  # type: ignore[type-arg]
    """A progress bar, used in a `with`. Either `update(n)` counts n more as done, or `look` reads
    how much is done.
    """

    monitor_interval = 0  # no thread of tqdm's
    last_print_t: float
    """`time.time()` of the last line; tqdm sets it, too."""

    def __init__(
        self,
        label: str,
        total: int,
        *,
        unit: str,
        done: int = 0,
        read: Callable[[], tuple[int, str]] | None = None,
        shown: bool = True,
    ) -> None:
        """total, done: how much work there is, and how much was done before the start.

        unit: what both count; "B" for bytes. read: returns how much is done now, and a few words
        about it.
        """
        self._read = read if shown else None
        super().__init__(
            desc=label,
            total=total,
            initial=done,
            unit=unit,
            unit_scale=unit == "B",
            disable=not shown,
            file=sys.stderr,
            mininterval=0.5 if sys.stderr.isatty() else 10.0,
            dynamic_ncols=True,
        )

    @staticmethod
    def status_printer(file: Any) -> Callable[[str], None]:
        """Return how to show a text: in the place of the last one on a terminal, else as a line."""
        if file.isatty():
            return tqdm.status_printer(file)
        return lambda text: say(text, error=True)

    def look(self, *, last: bool = False) -> None:
        """Show what `read` returns now, if it is time for a line or this is the last one."""
        if self._read is None:
            return
        if last or time.time() - self.last_print_t >= self.mininterval:
            self.n, about = self._read()
            self.set_postfix_str(about)
            self.last_print_t = time.time()

    def __exit__(self, kind: Any, *raised: Any) -> None:
        if kind is None:
            self.look(last=True)
        super().__exit__(kind, *raised)
