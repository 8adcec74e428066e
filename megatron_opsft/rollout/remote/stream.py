"""Work for separate engines while they decode: each gets more as it has room, and says at once what
has ended.
"""

from collections.abc import Iterator, Sequence

from megatron_opsft.rollout.engine import SamplingSettings, Take
from megatron_opsft.rollout.remote.client import EngineClient
from megatron_opsft.rollout.remote.fleet import Fleet
from megatron_opsft.rollout.requests import PromptRequest, join_requests, single_requests
from megatron_opsft.runtime.phase import count_done

Ended = list[tuple[PromptRequest, list[int]]]
"""Requests of one response, and its token ids."""

_POLL_MS = 10


class FleetStream:
    """What this rank's engines are asked for, one response after the other."""

    def __init__(self, fleet: Fleet, batch_size: int) -> None:
        """batch_size: of an engine."""
        self._fleet = fleet
        self._batch_size = batch_size
        self._lost: dict[int, list[PromptRequest]] = {}

    def run(self, take: Take, sampling: SamplingSettings) -> Iterator[Ended]:
        """What ends, until `take` has nothing left for any engine that lives and all are through.

        What an engine is asked and does not live to answer is asked first when it is run again.
        """
        open_ones = {
            number: _Open(client, self._batch_size, place, self._lost.pop(number, []))
            for place, (number, client) in enumerate(sorted(self._fleet.clients.items()))
        }
        for number, one in open_ones.items():
            with self._fleet.noting(number):
                one.client.send("stream", sampling)
        while True:
            living = [(number, open_ones[number]) for number, _ in self._fleet.living()]
            busy = [(number, one) for number, one in living if not one.is_through]
            if not busy:
                break
            for number, one in busy:
                with self._fleet.noting(number):
                    yield one.advance(take, _POLL_MS if len(busy) == 1 else 1)
        for number, one in open_ones.items():
            if one.unfinished:
                self._lost[number] = one.unfinished


class _Open:
    """One engine in a stream; place: among the rank's; first: what it is asked before all else."""

    def __init__(
        self, client: EngineClient, batch_size: int, place: int, first: Sequence[PromptRequest]
    ) -> None:
        self.client = client
        self.is_through = False
        self._room = batch_size
        self._place = place
        self._first = list(first)
        self._running: dict[tuple[str, int], PromptRequest] = {}
        self._more = True

    @property
    def unfinished(self) -> list[PromptRequest]:
        """Requests of one response."""
        return [*self._running.values(), *self._first]

    def advance(self, take: Take, milliseconds: int) -> Ended:
        """Give it what it has room for; what has ended. Errors: `EngineDied`."""
        if self._more and self._room:
            singles = self._next(take)
            self._running |= {(s.problem_id, s.sample_indices[0]): s for s in singles}
            self._room -= len(singles)
            self._more = bool(singles)
            self.client.add(join_requests(singles))
        found = self.client.ended(milliseconds)
        self.is_through = found is None
        ended = [(self._running.pop((name, index)), ids) for name, index, ids in found or ()]
        self._room += len(ended)
        count_done(len(ended))
        return ended

    def _next(self, take: Take) -> list[PromptRequest]:
        if self._first:
            singles, self._first = self._first[: self._room], self._first[self._room :]
            return singles
        return single_requests(take(self._room, self._place))
