"""The listening end of a watchdog's connections: lines of JSON over TCP, from ranks of this job.

A connection's first line is its rank's number and the job's token; strangers are sent away.
"""

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Collection, Iterator
from typing import Any

TICK_SECONDS = 0.1
_FAREWELL_SECONDS = 2.0
_MAX_GREETING = 1024  # bytes that a connection may send before it is known to be a rank's


class WatchLine:
    """The connections of those of `ranks` that have come, used by one thread."""

    def __init__(self, listener: socket.socket, token: str, ranks: Collection[int]) -> None:
        self._listener = listener
        self._token = token
        self._allowed = ranks
        self._lines: dict[socket.socket, bytes] = {}
        self._ranks: dict[socket.socket, int] = {}
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def hear(self) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """What ranks say within a moment; None of one whose connection has closed."""
        for key, _ in self._selector.select(TICK_SECONDS):
            source = key.fileobj
            assert isinstance(source, socket.socket)
            if source is self._listener:
                connection, _ = source.accept()
                connection.settimeout(1.0)
                self._lines[connection] = b""
                self._selector.register(connection, selectors.EVENT_READ)
            else:
                yield from self._read(source)

    def send(self, message: dict[str, Any]) -> None:
        """To every rank that has come; one that cannot be reached is heard to close."""
        data = json.dumps(message).encode() + b"\n"
        for connection in list(self._ranks):
            try:
                connection.sendall(data)
            except OSError:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def wait_until_gone(self) -> None:
        """What is sent to a rank may be lost if this process ends before the rank has read it; but
        for rank 0, which hears itself.
        """
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while set(self._ranks.values()) - {0} and time.monotonic() < deadline:
            for _ in self.hear():
                pass

    def close(self) -> None:
        """End all connections."""
        for connection in [*self._lines]:
            self._close(connection)
        self._listener.close()
        self._selector.close()

    def _read(self, source: socket.socket) -> Iterator[tuple[int, dict[str, Any] | None]]:
        try:
            data = source.recv(65536)
        except OSError:
            data = b""
        *lines, rest = (self._lines[source] + data).split(b"\n")
        self._lines[source] = rest
        if not data or (source not in self._ranks and not self._greeted(source, lines)):
            rank = self._close(source)
            if rank is not None:
                yield rank, None
            return
        for line in lines:
            yield self._ranks[source], json.loads(line)

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
            if message["token"] == self._token and message["rank"] in self._allowed:
                self._ranks[source] = message["rank"]
                return True
        return False

    def _close(self, connection: socket.socket) -> int | None:
        """The rank whose connection it was, if any."""
        self._selector.unregister(connection)
        connection.close()
        del self._lines[connection]
        return self._ranks.pop(connection, None)
