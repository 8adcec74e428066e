"""Carries out one rank's part of a transfer schedule: packs, sends, receives, unpacks.

Two rounds are on their way at a time: while one travels, the next is packed, and the one before is
unpacked.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_opsft.runtime.spanning_group import JobGroup, Message, PointToPoint
from megatron_opsft.transfer.delta import WHOLE, apply, delta_bytes, encode
from megatron_opsft.weights.rectangles import Rect
from megatron_opsft.weights.schedule import Program, Round

_Key = tuple[int, int]
"""Number of a round, and the other rank: there is one message."""


ALONE_BYTES = 2**17
"""From this size on a rectangle travels alone."""


@dataclass(frozen=True, slots=True)
class _Landing:
    """A message, or a delta of one, that is still to be written to its views."""

    views: Sequence[Tensor]
    message: Tensor
    is_delta: bool


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class _Posted:
    """A round on its way. The buffers must live until all of `works` have been waited for."""

    packed: Sequence[Tensor]
    landings: Sequence[_Landing]
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
                    now, before = (_views(rects, side) for side in (self._sources, self._before))
                    found, delta = encode(now, before)
                    self.elements_compared += sum(view.numel() for view in now)
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
        outgoing = self._changes.outgoing
        if self._before is None:
            sent = [r for each in self._program.rounds for rs in each.sends.values() for r in rs]
            names = dict.fromkeys(rect.tensor for rect in sent)
            self._before = {name: self._sources[name].clone() for name in names}
            return
        for number, current in enumerate(self._program.rounds):
            for peer, rects in current.sends.items():
                before = _views(rects, self._before)
                if (delta := outgoing.get((number, peer))) is not None:
                    apply(delta, before)
                    continue
                for old, now in zip(before, _views(rects, self._sources), strict=True):
                    old.copy_(now)

    def _post(self, current: Round, number: int) -> _Posted:
        outgoing, incoming = self._changes.outgoing, self._changes.incoming
        packed, landings = [], []
        receives: list[Message] = []
        sends: list[Message] = []
        for peer, rects in current.receives.items():
            if (number, peer) in incoming:
                size = delta_bytes(incoming[number, peer], self._empty.itemsize)
                delta = self._empty.new_empty(size, dtype=torch.uint8)
                landings.append(_Landing(_views(rects, self._targets), delta, is_delta=True))
                receives += [(peer, delta)] if size else []
                continue
            for views in _together(_views(rects, self._targets)):
                message = self._room(views)
                if len(views) > 1 or message is not views[0]:
                    landings.append(_Landing(views, message, is_delta=False))
                receives.append((peer, message))
        for peer, rects in current.sends.items():
            if (number, peer) in outgoing:
                delta = outgoing[number, peer]
                sends += [(peer, delta)] if len(delta) else []
                continue
            for views in _together(_views(rects, self._sources)):
                message = self._room(views)
                if len(views) > 1 or message is not views[0]:
                    packed.append(message)
                    for view, place in _places(views, message):
                        place.copy_(view)
                sends.append((peer, message))
        self.bytes_sent += sum(message.numel() * message.itemsize for _, message in sends)
        works = self._group.exchange(receives, sends, number)
        return _Posted(packed, landings, works)

    def _room(self, views: Sequence[Tensor]) -> Tensor:
        """A message of these views: the memory of one alone, or a buffer."""
        if len(views) == 1 and views[0].is_contiguous():
            return views[0]
        return self._empty.new_empty(sum(view.numel() for view in views))

    def _finish(self, posted: _Posted) -> None:
        for work in posted.works:
            work.wait()
        for landing in posted.landings:
            if landing.is_delta:
                apply(landing.message, landing.views)
                continue
            for view, place in _places(landing.views, landing.message):
                view.copy_(place)

    def _fill_locally(self) -> None:
        for copy in self._program.copies:
            source = copy.source.view(self._sources[copy.source.tensor])
            copy.target.view(self._targets[copy.target.tensor]).copy_(source)
        for padding in self._program.zeros:
            padding.view(self._targets[padding.tensor]).zero_()


def _views(rects: Sequence[Rect], parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """The places of a message in these parameters."""
    return [rect.view(parameters[rect.tensor]) for rect in rects]


def _together(views: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """What travels as one message: large ones alone, without a copy where they are contiguous; the
    small ones in one. Sender and receiver decide by size alone.
    """
    small = [view for view in views if view.numel() * view.itemsize < ALONE_BYTES]
    if small:
        yield small
    yield from ([view] for view in views if view.numel() * view.itemsize >= ALONE_BYTES)


def _places(views: Sequence[Tensor], message: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each view, and its place in a message of them."""
    start = 0
    for view in views:
        yield view, message.view(-1)[start : start + view.numel()].view(view.shape)
        start += view.numel()


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
