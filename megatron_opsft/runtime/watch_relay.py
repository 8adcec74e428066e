"""The relaying end of the watchdog: a thread of the first rank of a node, not rank 0's, that hears
the rest of the node and passes it on, so that rank 0 has one connection for each node.

To the node's ranks: `beat` with what this rank does, or the `end` that this rank was sent.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from typing import Any

from megatron_opsft.runtime.diagnosis import Diagnosis, Limits
from megatron_opsft.runtime.phase import current_phase
from megatron_opsft.runtime.watch_line import WatchLine


class WatchRelay:
    """Hears `ranks` until all have said `bye`, or until `end` was sent to them."""

    def __init__(
        self,
        ranks: Collection[int],
        token: str,
        listener: socket.socket,
        limits: Limits,
        pass_on: Callable[[dict[str, Any]], None],
    ) -> None:
        """pass_on: to rank 0; called in this thread. `done`: this process may end now."""
        self.done = threading.Event()
        self._missing = set(ranks)
        self._limits = limits
        self._pass_on = pass_on
        self._end: Diagnosis | None = None
        self._line = WatchLine(listener, token, frozenset(ranks))
        self._thread = threading.Thread(target=self._serve, name="watch-relay", daemon=True)
        self._thread.start()

    def end(self, diagnosis: Diagnosis) -> None:
        """Let the node's ranks end too; `done` follows."""
        self._end = diagnosis

    def join(self) -> None:
        """Until every rank of the node has left, or was sent the end."""
        self._thread.join()

    def _serve(self) -> None:
        next_beat = 0.0
        while self._missing and self._end is None:
            for rank, message in self._line.hear():
                self._relay(rank, {"lost": True} if message is None else message)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + self._limits.beat_seconds
                self._line.send({"beat": str(current_phase())})
        if self._end is not None:
            self._line.send({"end": asdict(self._end)})
            self._line.wait_until_gone()
        self.done.set()
        self._line.close()

    def _relay(self, rank: int, message: dict[str, Any]) -> None:
        if "bye" in message:
            self._missing.discard(rank)
        if rank in self._missing or "bye" in message:  # who has left may close
            with contextlib.suppress(OSError):  # of a lost connection the watchdog's thread hears
                self._pass_on({"rank": rank, **message})
