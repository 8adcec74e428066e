"""The engine processes that this rank asks; what all ranks do together when one has died.

Ranks decide together, because a new engine needs the weights, which all ranks have. What an engine
had been asked is then asked again, with the same seeds: its answer depends on the weights and on
the request alone.
"""

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import zmq

from megatron_opsft.errors import EngineDied, EnginesLost, UserError
from megatron_opsft.rollout.remote.client import Connected, EngineClient
from megatron_opsft.runtime.distributed import any_over_world, gather_from_all

log = logging.getLogger("megatron_opsft")

MAX_DEATHS = 5  # in a row: an engine that dies so often dies of something that lasts
Arguments = Callable[[int], tuple[Any, ...]]
"""Number of an engine -> what it is given."""


def _nothing(number: int) -> tuple[Any, ...]:
    return ()


class Fleet:
    """`clients`: this rank's engines by their number among all. One that has died is not asked any
    more until `replace_dead`.
    """

    def __init__(
        self,
        numbers: Collection[int],
        connect: Callable[[int, "zmq.Context[Any]"], Connected],
        introduce: Callable[[EngineClient], None],
        timeout_seconds: float,
    ) -> None:
        """Called by every rank; returns when all engines are there.

        connect: starts an engine's process; introduce: makes it an engine.
        Errors: `UserError` for an engine that cannot be started.
        """
        self.clients: dict[int, EngineClient] = {}
        self._connect, self._introduce = connect, introduce
        self._timeout = timeout_seconds
        self._dead: dict[int, EngineDied] = {}
        if why := self._start(numbers, tries=1):
            raise UserError(f"a rollout engine cannot be started: {why}")

    def call(self, method: str, arguments: Arguments = _nothing) -> dict[int, Any]:
        """What each engine answers, asked all at once; of those that live."""
        self.send(method, arguments)
        return self.receive()

    def send(self, method: str, arguments: Arguments = _nothing) -> None:
        """Ask without waiting; `receive` must follow, once for each request."""
        for number, client in self.living():
            with self.noting(number):
                client.send(method, *arguments(number))

    def receive(self) -> dict[int, Any]:
        """The answers to the oldest request that has none yet."""
        answers = {}
        for number, client in self.living():
            with self.noting(number):
                answers[number] = client.receive()
        return answers

    def living(self) -> list[tuple[int, EngineClient]]:
        """The engines that can be asked."""
        return [(n, client) for n, client in self.clients.items() if n not in self._dead]

    @contextmanager
    def noting(self, number: int) -> Iterator[None]:
        """An engine that dies inside is dead from now on."""
        try:
            yield
        except EngineDied as died:
            self._dead[number] = died

    def why_dead(self) -> str:
        """How the first of this rank's dead engines died; "" where all live."""
        return next((str(died) for died in self._dead.values()), "")

    def replace_dead(self) -> bool:
        """Whether any rank's engine has died; then all live again, the new ones without weights.
        Called by every rank. Errors: `EnginesLost`, on every rank, where one stays dead.
        """
        if not any_over_world(bool(self._dead)):
            return False
        for died in self._dead.values():
            log.warning("%s; starting another one", died)
        if why := self._start(list(self._dead), tries=MAX_DEATHS):
            raise EnginesLost(f"a rollout engine is gone, and no other one can be started: {why}")
        return True

    def _start(self, numbers: Collection[int], tries: int) -> str:
        """Why one has died `tries` times before it was there; "" when all live."""
        for _ in range(tries):
            self._dead = {}
            for number in numbers:
                if number in self.clients:
                    self.clients.pop(number).close()
                with self.noting(number):
                    connect = partial(self._connect, number)
                    self.clients[number] = EngineClient(connect, self._timeout)
            for number in numbers:
                if number not in self._dead:
                    with self.noting(number):
                        self._introduce(self.clients[number])
            reports = gather_from_all([str(died) for died in self._dead.values()])
            if not reports:
                return ""
            numbers = list(self._dead)
        return str(reports[0])

    def close(self) -> None:
        """End the processes."""
        for client in self.clients.values():
            client.close()
        self.clients.clear()
