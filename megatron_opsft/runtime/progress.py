"""How far a piece of work is: tqdm's bar on standard error, now and then where that is a file."""

import sys
import time
from collections.abc import Callable

from tqdm import tqdm


class Progress(tqdm):  # type: ignore[type-arg]
    """Use it in a `with`; `update(n)` counts n more as done, or `look` asks how much that is."""

    monitor_interval = 0  # no thread beside

    def __init__(
        self,
        label: str,
        total: int,
        *,
        unit: str,
        done: int = 0,
        read: Callable[[], tuple[int, str]] = lambda: (0, ""),
        shown: bool = True,
    ) -> None:
        """done: of `total` before the start. read: gives what is done now and a few words about it.
        unit: of both; "B" for bytes.
        """
        self._read = read
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

    def look(self) -> None:
        """Show what is done now, if it is time."""
        if not self.disable and time.time() - self.last_print_t >= self.mininterval:
            done, about = self._read()
            self.set_postfix_str(about, refresh=False)
            self.update(done - self.n)
            self.refresh()
