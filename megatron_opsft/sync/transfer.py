"""Carries out one rank's part of a transfer schedule: packs, sends, receives, unpacks.

Two rounds are on their way at a time: while one travels, the next is packed, and the one before is
unpacked.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_opsft.weights.rectangles import Rect
from megatron_opsft.weights.schedule import Program, Round


@dataclass(frozen=True, slots=True)
class _Posted:
    """A round on its way. The buffers must live until all of `works` have been waited for."""

    current: Round
    sent: Tensor
    received: Tensor
    works: Sequence[dist.Work]


class Transfer:
    """Fills the targets of all ranks from their sources; made once, run for every push or pull.

    Over the default process group; every rank has its own program of the same schedule.
    """

    def __init__(
        self, program: Program, sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]
    ) -> None:
        """sources, targets: this rank's live parameters under the schedule's names, looked up anew
        at every run.

        Errors: ValueError for a parameter that is missing or not of the others' dtype.
        """
        self._program = program
        self._sources = sources
        self._targets = targets
        self._empty = _check_parameters(program, sources, targets)
        self._is_connected = False

    @torch.no_grad()
    def run(self) -> None:
        """Collective over the world. It takes less than two buckets of memory."""
        if self._program.rounds and not self._is_connected:
            self._connect()
        posted: _Posted | None = None
        for number, current in enumerate(self._program.rounds):
            following = self._post(current, number)
            if posted is None:
                self._fill_locally()
            else:
                self._finish(posted)
            posted = following
        if posted is None:
            self._fill_locally()
        else:
            self._finish(posted)

    def _connect(self) -> None:
        """A collective of all ranks; NCCL wants one before messages between some of them."""
        dist.all_reduce(self._empty.new_zeros(1, dtype=torch.uint8))
        self._is_connected = True

    def _post(self, current: Round, number: int) -> _Posted:
        sent, received = (
            self._empty.new_empty(sum(rect.num_elements for rects in by_peer for rect in rects))
            for by_peer in (current.sends.values(), current.receives.values())
        )
        operations = [
            dist.P2POp(dist.irecv, message, peer, tag=number)
            for peer, _, message in _messages(current.receives, received)
        ]
        for peer, rects, message in _messages(current.sends, sent):
            for source, place in _places(rects, message, self._sources):
                place.copy_(source)
            operations.append(dist.P2POp(dist.isend, message, peer, tag=number))
        works = dist.batch_isend_irecv(operations) if operations else []
        return _Posted(current, sent, received, works)

    def _finish(self, posted: _Posted) -> None:
        for work in posted.works:
            work.wait()
        for _, rects, message in _messages(posted.current.receives, posted.received):
            for target, place in _places(rects, message, self._targets):
                target.copy_(place)

    def _fill_locally(self) -> None:
        for copy in self._program.copies:
            source = copy.source.view(self._sources[copy.source.tensor])
            copy.target.view(self._targets[copy.target.tensor]).copy_(source)
        for padding in self._program.zeros:
            padding.view(self._targets[padding.tensor]).zero_()


def _messages(
    by_peer: Mapping[int, tuple[Rect, ...]], buffer: Tensor
) -> Iterator[tuple[int, tuple[Rect, ...], Tensor]]:
    """Each peer with its rectangles and its part of the buffer."""
    start = 0
    for peer, rects in by_peer.items():
        stop = start + sum(rect.num_elements for rect in rects)
        yield peer, rects, buffer[start:stop]
        start = stop


def _places(
    rects: Sequence[Rect], message: Tensor, parameters: Mapping[str, Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """The view of each rectangle in its parameter, and in the message."""
    start = 0
    for rect in rects:
        inside = rect.view(parameters[rect.tensor])
        yield inside, message[start : start + inside.numel()].view(inside.shape)
        start += inside.numel()


def _check_parameters(
    program: Program, sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]
) -> Tensor:
    """An empty tensor of the parameters' dtype and device."""
    sent = [rect for r in program.rounds for rects in r.sends.values() for rect in rects]
    received = [rect for r in program.rounds for rects in r.receives.values() for rect in rects]
    sent += [copy.source for copy in program.copies]
    received += [copy.target for copy in program.copies]
    first: Tensor | None = None
    for rects, tensors in ((sent, sources), ([*received, *program.zeros], targets)):
        for name in dict.fromkeys(rect.tensor for rect in rects):
            if name not in tensors:
                raise ValueError(f"the schedule names a parameter that is not here: {name}")
            tensor = tensors[name]
            first = tensor if first is None else first
            if tensor.dtype != first.dtype:
                raise ValueError(f"{name} is {tensor.dtype}, others are {first.dtype}")
    return torch.empty(0) if first is None else first.new_empty(0)
