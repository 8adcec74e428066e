"""How far a piece of work is: a bar of tqdm's on a terminal, its lines now and then elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from megatron_opsft.runtime.console import say


class Progress(tqdm):  # type: ignore[type-arg]
    """Use it in a `with`; `update(n)` counts n more as done, or `look` asks how much that is."""

    monitor_interval = 0  # no thread beside
    last_print_t: float  # as tqdm leaves it

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
        """done: of `total` before the start. read: gives what is done now and a few words about it.
        unit: of both; "B" for bytes.
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
        """A bar over itself on a terminal; elsewhere a line, which others may follow."""
        if file.isatty():
            return tqdm.status_printer(file)
        return lambda text: say(text, error=True)

    def look(self, *, last: bool = False) -> None:
        """Show what is done now, if it is time."""
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
