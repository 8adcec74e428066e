"""The watching end of the watchdog: a thread of rank 0 that hears every rank and ends the job.

Lines of JSON over TCP. From a rank: its token and number, then a `beat` now and then, `failed` when
it fails, `bye` when it is done. To a rank: `beat` with what rank 0 does, or `end` with a diagnosis.
"""

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from megatron_opsft.runtime.diagnosis import Diagnosis, Limits, Peer, Process, diagnose
from megatron_opsft.runtime.phase import current_phase

_TICK_SECONDS = 0.1
_FAREWELL_SECONDS = 2.0
_MAX_GREETING = 1024  # bytes that a connection may send before it is known to be a rank's


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
        self._token = token
        self._limits = limits
        self._on_diagnosis = on_diagnosis
        self._peers = {p.rank: Peer(process=p, heard=now, entered=now) for p in processes}
        self._lines: dict[socket.socket, bytes] = {}
        self._ranks: dict[socket.socket, int] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="watch-server", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Until every rank has left, or was sent the end."""
        self._thread.join()

    def _serve(self) -> None:
        next_beat = last = time.monotonic()
        while not all(peer.left for peer in self._peers.values()):
            self._hear(_TICK_SECONDS)
            now = time.monotonic()
            if now - last > self._limits.silence_seconds / 2:
                # It was this process that stood still: the others were not heard for that.
                for peer in self._peers.values():
                    peer.heard = now
            last = now
            if diagnosis := diagnose(self._peers.values(), now, self._limits):
                self.diagnosis = diagnosis
                self._send({"end": asdict(diagnosis)})
                self._on_diagnosis(diagnosis)
                self._wait_until_gone()
                break
            if now >= next_beat:
                next_beat = now + self._limits.beat_seconds
                self._send({"beat": str(current_phase())})
        self.done.set()
        for connection in [*self._lines]:
            self._close(connection)
        self._listener.close()
        self._selector.close()

    def _wait_until_gone(self) -> None:
        """What is sent to a rank may be lost if this process ends before the rank has read it."""
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while set(self._ranks.values()) - {0} and time.monotonic() < deadline:
            self._hear(_TICK_SECONDS)

    def _hear(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            source = key.fileobj
            assert isinstance(source, socket.socket)
            if source is self._listener:
                connection, _ = source.accept()
                connection.settimeout(1.0)
                self._lines[connection] = b""
                self._selector.register(connection, selectors.EVENT_READ)
                continue
            try:
                data = source.recv(65536)
            except OSError:
                data = b""
            if not data:
                self._close(source)
                continue
            *lines, self._lines[source] = (self._lines[source] + data).split(b"\n")
            if source not in self._ranks and not self._greeted(source, lines):
                self._close(source)
                continue
            for line in lines:
                self._understand(source, json.loads(line))

    def _greeted(self, source: socket.socket, lines: list[bytes]) -> bool:
        """Whether a connection may stay: its first line, taken from `lines`, is that of a rank of
        this job, or has not come to its end yet.
        """
        if not lines:
            return len(self._lines[source]) <= _MAX_GREETING
        greeting = lines.pop(0)
        return len(greeting) <= _MAX_GREETING and self._admit(source, greeting)

    def _admit(self, source: socket.socket, line: bytes) -> bool:
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            message = json.loads(line)
            if message["token"] == self._token and message["rank"] in self._peers:
                self._ranks[source] = message["rank"]
                return True
        return False

    def _understand(self, source: socket.socket, message: dict[str, Any]) -> None:
        now = time.monotonic()
        peer = self._peers[self._ranks[source]]
        peer.heard = now
        if "beat" in message:
            peer.where, peer.number, age = message["beat"]
            peer.entered = now - age
        if "failed" in message and peer.failed is None:
            code, text = message["failed"]
            peer.failed = (now, code, text)
        if "bye" in message:
            peer.left = True

    def _close(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()
        del self._lines[connection]
        rank = self._ranks.pop(connection, None)
        if rank is not None and not self._peers[rank].left:
            self._peers[rank].lost = time.monotonic()

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        for connection in list(self._ranks):
            try:
                connection.sendall(data)
            except OSError:
                self._close(connection)
