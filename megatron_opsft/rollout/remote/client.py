"""A trainer rank's end of a separate engine: asks it, and sees it die."""

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import zmq

from megatron_opsft.errors import EngineDied, UserError
from megatron_opsft.rollout.remote.messages import Kind, Reply, Request
from megatron_opsft.rollout.requests import PromptRequest

_POLL_MS = 20
_START_SECONDS = 1800.0


class Connected(Protocol):
    """An engine process, here (`EngineProcess`) or on another node (`HostedEngine`)."""

    @property
    def pid(self) -> int: ...
    def can_send(self, milliseconds: int) -> bool: ...
    def send(self, content: bytes) -> None: ...
    def poll(self, milliseconds: int) -> bool: ...
    def receive(self) -> bytes: ...
    def ended(self) -> str: ...
    def last_words(self) -> str: ...
    def close(self) -> None: ...


class EngineClient:
    """One engine process; `EngineDied` from any call means that a new client is needed."""

    def __init__(
        self, connect: Callable[[zmq.Context[Any]], Connected], timeout_seconds: float
    ) -> None:
        """connect: starts the process.
        timeout_seconds: without a word for so long while it should answer, it is hung.

        Errors: those of `connect`.
        """
        self._timeout = timeout_seconds
        # In a stream: seconds waited in vain; whether its end has come.
        self._silence, self._is_through = 0.0, False
        self._context = zmq.Context()
        try:
            self._process = connect(self._context)
        except BaseException:
            self._context.term()
            raise

    @property
    def pid(self) -> int:
        """Process id of the engine, on its node."""
        return self._process.pid

    def start(self, *arguments: Any) -> Any:
        """`call("start", ...)`, which takes the time to load libraries and to build the engine."""
        timeout = max(_START_SECONDS, self._timeout)
        self._send(Request("start", arguments), timeout)
        return self._receive(timeout)

    def call(self, method: str, *arguments: Any) -> Any:
        """The result of a method of `process.Service`.

        Errors: `EngineDied`; `UserError` where starting again would not help.
        """
        self.send(method, *arguments)
        return self.receive()

    def send(self, method: str, *arguments: Any) -> None:
        """Ask without waiting for the result; `receive` must follow, once for each request."""
        self._send(Request(method, arguments), self._timeout)

    def receive(self) -> Any:
        """The result of the oldest request that has none yet."""
        return self._receive(self._timeout)

    def add(self, requests: Sequence[PromptRequest]) -> None:
        """More for the engine that is streaming; none: that was all."""
        self._send(Request("add", (requests,)), self._timeout)

    def ended(self, milliseconds: int) -> list[tuple[str, int, list[int]]] | None:
        """Responses that have ended since the last call, as (problem, sample, token ids); None when
        the stream is through. Waits for at most so long.

        Errors: `EngineDied`, also where it was waited for in vain too often.
        """
        start = time.monotonic()
        if self._is_through:
            self._is_through = False
            return None
        if not self._process.poll(milliseconds):
            if how := self._process.ended():
                raise self._died(how)
            self._silence += time.monotonic() - start
            if self._silence > self._timeout:
                raise self._died(f"was silent for {self._timeout:.0f} s")
            return []
        found: list[tuple[str, int, list[int]]] = []
        self._silence = 0.0
        while not self._is_through and self._process.poll(0):
            reply: Reply = pickle.loads(self._process.receive())
            match reply.kind:
                case Kind.ENDED:
                    found += reply.value
                case Kind.RESULT:
                    self._is_through = True  # the next call says so
                case Kind.ERROR:
                    raise UserError(reply.value)
        return found

    def _send(self, request: Request, timeout: float) -> None:
        self._wait(self._process.can_send, timeout)
        self._process.send(pickle.dumps(request))

    def _receive(self, timeout: float) -> Any:
        while True:
            self._wait(self._process.poll, timeout)
            reply: Reply = pickle.loads(self._process.receive())
            if reply.kind is Kind.RESULT:
                return reply.value
            if reply.kind is Kind.ERROR:
                raise UserError(reply.value)

    def _wait(self, is_ready: Callable[[int], bool], timeout: float) -> None:
        """Until the process can be told something, or was heard; `EngineDied` if it never can."""
        deadline = time.monotonic() + timeout
        while not is_ready(_POLL_MS):
            if how := self._process.ended():
                raise self._died(how)
            if time.monotonic() > deadline:
                raise self._died(f"was silent for {timeout:.0f} s")

    def close(self) -> None:
        """End the process, however busy it is, and remove its socket."""
        self._process.close()
        self._context.term()

    def _died(self, how: str) -> EngineDied:
        process = self._process
        return EngineDied(f"rollout engine (process {process.pid}) {how}; {process.last_words()}")
