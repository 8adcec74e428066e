"""The other ranks of a large job, as one of its ranks meets them in `runtime.exchange`.

Megatron and torch get a fake process group of that size. The messages of the exchanges are made up
here, byte for byte as the other ranks would send them, so that the project's own functions run
for real on a rank that is alone. What making them up takes is counted apart.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from megatron_opsft.runtime import exchange

Parts = Mapping[int, Tensor]  # rank -> what is for it


class FakeWorld:
    """`routed`: rank -> what it gives to the next `route_bytes`, after `will_gather()` without
    anything.

    received, sent: bytes of this rank; partners: ranks it has exchanged messages with; own_seconds:
    of this class.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._coming: list[Tensor] = []
        self._gathers: list[Sequence[Tensor]] = []
        self._num_begun = 0
        self.routed: Mapping[int, Parts] = {}
        self.reset()

    def reset(self) -> None:
        self.received = self.sent = 0
        self.own_seconds = 0.0
        self.partners: set[int] = set()

    def will_gather(self, *gathers: Sequence[Tensor]) -> None:
        """What each rank gives to the next calls of `all_gather_bytes`; the last also to more."""
        self._gathers, self._num_begun = list(gathers), 0

    @contextmanager
    def installed(self) -> Iterator["FakeWorld"]:
        with patch.object(exchange, "_exchange", self._exchange):
            yield self

    def _exchange(self, mine: Tensor, room: Tensor, to: int, source: int) -> Tensor:
        """As `runtime.exchange._exchange`: first the sizes of some vectors, then the vectors."""
        begin = time.process_time()
        self.partners |= {to, source}
        if mine.dtype is torch.int64:
            self._coming = self._vectors_of(source, len(mine))
            room.copy_(torch.tensor([len(vector) for vector in self._coming]))
        elif len(room):
            torch.cat(self._coming, out=room)
        self.sent += mine.nbytes
        self.received += room.nbytes
        self.own_seconds += time.process_time() - begin
        return room

    def _vectors_of(self, source: int, count: int) -> list[Tensor]:
        distance = (source - self._rank) % self._world_size
        if self._gathers:
            self._num_begun += distance == 1  # the first round of each
            given = self._gathers[min(self._num_begun, len(self._gathers)) - 1]
            return [given[(source + i) % self._world_size] for i in range(count)]
        return self._parcels_of(source, self._world_size - distance)

    def _parcels_of(self, holder: int, distance: int) -> list[Tensor]:
        """Labels and contents of what `holder` passes on by so many ranks."""
        leaving = [
            (source, to, part)
            for source, parts in self.routed.items()
            for to, part in parts.items()
            if (way := (to - source) % self._world_size) & distance
            and (source + way % distance) % self._world_size == holder
        ]
        labels = torch.tensor([(s, t, len(part)) for s, t, part in leaving], dtype=torch.int64)
        contents = [part for _, _, part in leaving] or [torch.empty(0, dtype=torch.uint8)]
        return [labels.flatten().view(torch.uint8), torch.cat(contents)]
