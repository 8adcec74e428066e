"""Carries out one rank's part of a transfer schedule: packs, sends, receives, unpacks.

Two rounds are on their way at a time: while one travels, the next is packed, and the one before is
unpacked.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_opsft.runtime.spanning_group import JobGroup, PointToPoint
from megatron_opsft.transfer.delta import WHOLE, apply, delta_bytes, encode
from megatron_opsft.weights.rectangles import Rect
from megatron_opsft.weights.schedule import Program, Round

_Key = tuple[int, int]
"""Number of a round, and the other rank: there is one message."""


@dataclass(frozen=True, slots=True)
class _Posted:
    """A round on its way. The buffers must live until all of `works` have been waited for.

    sent, received: whole messages one behind the other; deltas: those that come, by their sender.
    """

    current: Round
    number: int
    sent: Tensor
    received: Tensor
    deltas: Mapping[int, Tensor]
    works: Sequence[Any]


@dataclass(slots=True)
class _Changes:
    """outgoing: the messages that go as deltas. incoming: how many elements changed of each message
    that comes as one.
    """

    outgoing: dict[_Key, Tensor] = field(default_factory=dict)
    incoming: dict[_Key, int] = field(default_factory=dict)


class Transfer:
    """Fills the targets of all ranks from their sources; made once, run for every push or pull.

    Every rank of the group has its own program of the same schedule.
    """

    def __init__(
        self,
        program: Program,
        sources: Mapping[str, Tensor],
        targets: Mapping[str, Tensor],
        group: PointToPoint | None = None,
        *,
        delta: bool = False,
    ) -> None:
        """sources, targets: this rank's live parameters under the schedule's names, looked up anew
        at every run. group: by default the job's ranks.
        delta: from the second run on a message may bring only what has changed since the run before
        (`delta`), where that is less; the same on all ranks. The targets must be as that run left
        them. It takes memory for a copy of the sources.

        Errors: ValueError for a parameter that is missing or not of the others' dtype.
        """
        self._program = program
        self._sources = sources
        self._targets = targets
        self._group = group or JobGroup()
        self._empty = _check_parameters(program, sources, targets)
        self._is_connected = False
        self._delta = delta
        self._before: dict[str, Tensor] | None = None
        self._changes = _Changes()
        self.bytes_sent = self.elements_compared = self.elements_changed = 0

    @torch.no_grad()
    def run(self) -> None:
        """Collective over the group. It takes less than two buckets of memory, and with `delta`
        what changes.

        `bytes_sent` is then this rank's, and how many elements of its messages were compared, and
        had changed. Errors: RuntimeError where a member of a spanning group is lost.
        """
        self.bytes_sent = self.elements_compared = self.elements_changed = 0
        if self._program.rounds and not self._is_connected:
            self._group.connect(self._empty)
            self._is_connected = True
        if self._delta:
            self._changes = self._compare()
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
        if self._delta:
            self._remember()

    def _compare(self) -> _Changes:
        """What goes as a delta, and what comes as one: all ranks tell each other."""
        changes = _Changes()
        sizes: dict[int, list[int]] = {}
        for number, current in enumerate(self._program.rounds):
            for peer, rects in current.sends.items():
                size = WHOLE
                if self._before is not None:
                    now, before = (_pack(rects, side) for side in (self._sources, self._before))
                    found, delta = encode(now, before)
                    self.elements_compared += now.numel()
                    self.elements_changed += found
                    if delta is not None:
                        size, changes.outgoing[number, peer] = found, delta
                sizes.setdefault(peer, []).append(size)
        places: dict[int, list[_Key]] = {}
        for number, current in enumerate(self._program.rounds):
            for peer in current.receives:
                places.setdefault(peer, []).append((number, peer))
        kind: dict[str, Any] = {"dtype": torch.int64, "device": self._empty.device}
        told = {peer: torch.tensor(mine, **kind) for peer, mine in sizes.items()}
        heard = {peer: torch.empty(len(keys), **kind) for peer, keys in places.items()}
        number = len(self._program.rounds)
        for work in self._group.exchange([*heard.items()], [*told.items()], number):
            work.wait()
        for peer, keys in places.items():
            for key, size in zip(keys, heard[peer].tolist(), strict=True):
                if size != WHOLE:
                    changes.incoming[key] = size
        return changes

    def _remember(self) -> None:
        """Keep what was sent."""
        if self._before is None:
            sent = [
                rect for r in self._program.rounds for rects in r.sends.values() for rect in rects
            ]
            names = dict.fromkeys(rect.tensor for rect in sent)
            self._before = {name: self._sources[name].clone() for name in names}
        elif self.elements_changed:
            for name, before in self._before.items():
                before.copy_(self._sources[name])

    def _post(self, current: Round, number: int) -> _Posted:
        outgoing, incoming = self._changes.outgoing, self._changes.incoming
        whole_out = {p: rects for p, rects in current.sends.items() if (number, p) not in outgoing}
        whole_in = {
            p: rects for p, rects in current.receives.items() if (number, p) not in incoming
        }
        sent, received = (
            self._empty.new_empty(sum(rect.num_elements for rects in by_peer for rect in rects))
            for by_peer in (whole_out.values(), whole_in.values())
        )
        deltas = {
            peer: self._empty.new_empty(
                delta_bytes(incoming[number, peer], self._empty.itemsize), dtype=torch.uint8
            )
            for peer in current.receives
            if (number, peer) in incoming
        }
        receives = [(peer, message) for peer, _, message in _messages(whole_in, received)]
        receives += [(peer, delta) for peer, delta in deltas.items() if len(delta)]
        sends = []
        for peer, rects, message in _messages(whole_out, sent):
            for source, place in _places(rects, message, self._sources):
                place.copy_(source)
            sends.append((peer, message))
        own = [(peer, outgoing[number, peer]) for peer in current.sends if peer not in whole_out]
        sends += [(peer, delta) for peer, delta in own if len(delta)]
        self.bytes_sent += sum(message.numel() * message.itemsize for _, message in sends)
        works = self._group.exchange(receives, sends, number)
        return _Posted(current, number, sent, received, deltas, works)

    def _finish(self, posted: _Posted) -> None:
        for work in posted.works:
            work.wait()
        receives = posted.current.receives
        whole = {peer: rects for peer, rects in receives.items() if peer not in posted.deltas}
        for _, rects, message in _messages(whole, posted.received):
            for target, place in _places(rects, message, self._targets):
                target.copy_(place)
        for peer, delta in posted.deltas.items():
            views = [rect.view(self._targets[rect.tensor]) for rect in receives[peer]]
            apply(delta, self._changes.incoming[posted.number, peer], views)

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


def _pack(rects: Sequence[Rect], parameters: Mapping[str, Tensor]) -> Tensor:
    """A message."""
    return torch.cat([rect.view(parameters[rect.tensor]).flatten() for rect in rects])


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
