"""The judging end of the watchdog: a thread of rank 0 that hears of every rank and ends the job.

From a rank: a `beat` now and then, `failed` when it fails, `bye` when it is done; what a node's
first rank passes on (`watch_relay`) has the `rank` it is from, and `lost` for one that closed its
connection. To a rank: `beat` with what rank 0 does, or `end` with a diagnosis.
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from megatron_opsft.runtime.diagnosis import (
    Diagnosis,
    Limits,
    Peer,
    Process,
    diagnose,
    listeners,
)
from megatron_opsft.runtime.phase import current_phase
from megatron_opsft.runtime.watch_line import WatchLine


class WatchServer:
    """Hears the ranks until all have said `bye`, or until it has sent `end` to all."""

    def __init__(
        self,
        processes: Sequence[Process],
        token: str,
        listener: socket.socket,
        limits: Limits,
        on_diagnosis: Callable[[Diagnosis], None],
    ) -> None:
        """on_diagnosis: called in this thread when every rank was sent the end.

        `done`: this process may end now. `diagnosis`: none if all have left in peace.
        """
        now = time.monotonic()
        self.done = threading.Event()
        self.diagnosis: Diagnosis | None = None
        self._limits = limits
        self._on_diagnosis = on_diagnosis
        self._peers = {p.rank: Peer(process=p, heard=now, entered=now) for p in processes}
        above = listeners(processes)
        for rank, peer in self._peers.items():
            peer.through = self._peers[above[rank]] if above[rank] else None
        direct = [rank for rank in above if not above[rank]]
        self._line = WatchLine(listener, token, direct)
        self._thread = threading.Thread(target=self._serve, name="watch-server", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Until every rank has left, or was sent the end."""
        self._thread.join()

    def _serve(self) -> None:
        next_beat = last = time.monotonic()
        while not all(peer.left for peer in self._peers.values()):
            for rank, message in self._line.hear():
                self._understand(rank, {"lost": True} if message is None else message)
            now = time.monotonic()
            if now - last > self._limits.silence_seconds / 2:
                # It was this process that stood still: the others were not heard for that.
                for peer in self._peers.values():
                    peer.heard = now
            last = now
            if diagnosis := diagnose(self._peers.values(), now, self._limits):
                self.diagnosis = diagnosis
                self._line.send({"end": asdict(diagnosis)})
                self._on_diagnosis(diagnosis)
                self._line.wait_until_gone()
                break
            if now >= next_beat:
                next_beat = now + self._limits.beat_seconds
                self._line.send({"beat": str(current_phase())})
        self.done.set()
        self._line.close()

    def _understand(self, source: int, message: dict[str, Any]) -> None:
        """source: the rank whose connection it came by."""
        now = time.monotonic()
        if now - self._peers[source].heard > self._limits.silence_seconds / 2:
            self._excuse(source, now)
        self._peers[source].heard = now
        peer = self._peers[message.get("rank", source)]
        peer.heard = now
        if "beat" in message:
            peer.where, peer.number, age = message["beat"]
            peer.entered = now - age
        if "failed" in message and peer.failed is None:
            code, text = message["failed"]
            peer.failed = (now, code, text)
        if "lost" in message and not peer.left:
            peer.lost = now
        if "bye" in message:
            peer.left = True

    def _excuse(self, source: int, now: float) -> None:
        """Who is heard through a rank that stood still was not heard for that."""
        for peer in self._peers.values():
            if peer.through is self._peers[source]:
                peer.heard = now
