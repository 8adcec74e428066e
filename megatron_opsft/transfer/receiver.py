"""An engine worker's end of a push: a rank of the spanning group, and what it receives."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_opsft.runtime.spanning_group import Meeting, SpanningGroup
from megatron_opsft.transfer.transfer import Transfer
from megatron_opsft.weights.schedule import Program

Load = Callable[[Iterable[tuple[str, Tensor]]], None]
"""An engine's own loader of a stream of whole HF tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a worker gets its weights.

    programs: one that fills its own parameters where `in_place`; else several, each of which fills
    whole HF tensors that are then given to its loader. shapes: of those.
    """

    in_place: bool
    programs: tuple[Program, ...]
    shapes: Mapping[str, tuple[int, ...]]


class Receiver:
    """Joins groups, one after the other, and receives in the newest."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """dtype: of the trainer's weights."""
        self._device, self._dtype = device, dtype
        self._group: SpanningGroup | None = None
        self._way: Way | None = None
        self._transfers: list[tuple[Transfer, dict[str, Tensor]]] = []

    def join(self, meeting: Meeting, rank: int, own_host: str) -> str:
        """Why that failed; "" where the group is there."""
        self.leave()
        try:
            self._group = SpanningGroup(meeting, rank, self._device, own_host)
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        return ""

    def plan(self, way: Way, parameters: Mapping[str, Tensor]) -> None:
        """What the following calls of `receive` do. parameters: of the engine, live."""
        self._way, self._transfers = way, []
        for program in way.programs:
            staged: dict[str, Tensor] = {}
            if not way.in_place:
                staged = self._stage(program, way)
            targets = parameters if way.in_place else staged
            transfer = Transfer(program, {}, targets, self._group)
            self._transfers.append((transfer, staged))
            staged.clear()  # until it is filled

    def _stage(self, program: Program, way: Way) -> dict[str, Tensor]:
        received = [rect for r in program.rounds for rects in r.receives.values() for rect in rects]
        names = dict.fromkeys(rect.tensor for rect in received)
        return {
            name: torch.empty(way.shapes[name], dtype=self._dtype, device=self._device)
            for name in names
        }

    def receive(self, load: Load) -> str:
        """One push. Why it failed, half done; "" where all is there. load: not called in place."""
        assert self._way is not None
        try:
            if self._way.in_place:
                for transfer, _ in self._transfers:
                    transfer.run()
            else:
                load(self._whole_tensors(self._way))
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            del error
            self.leave()
            return reason
        return ""

    def _whole_tensors(self, way: Way) -> Iterator[tuple[str, Tensor]]:
        for (transfer, staged), program in zip(self._transfers, way.programs, strict=True):
            staged.update(self._stage(program, way))
            transfer.run()
            yield from staged.items()
            staged.clear()

    def leave(self) -> None:
        """Close the group, so that the others hear of it."""
        self._transfers = []
        if self._group is not None:
            self._group.close()
            self._group = None
