"""The process group that the workers of separate engines share with the training ranks: how it is
made, and what the engines are told of the weights that come over it.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

from megatron_opsft.errors import EngineDied
from megatron_opsft.rollout.engine import EngineLayout
from megatron_opsft.rollout.remote.fleet import Fleet
from megatron_opsft.runtime.device import Device
from megatron_opsft.runtime.distributed import Layout, broadcast_object, gather_from_all
from megatron_opsft.runtime.spanning_group import (
    SpanningGroup,
    address_towards,
    open_meeting,
)
from megatron_opsft.transfer.receiver import Way


class EngineGroup:
    """`ReachableEngine`; every rank calls every method."""

    def __init__(
        self,
        fleet: Fleet,
        layout: EngineLayout,
        ranks: Layout,
        device: Device,
        *,
        hosts: Sequence[str],
        num_engines: int,
        timeout_seconds: float,
        replace_dead: Callable[[], bool],
        together: Callable[[str], dict[int, Any]],
        hold: Callable[[int | None], None],
    ) -> None:
        """ranks: of the trainer; hosts: of the engines by number, none where they are on this node.

        replace_dead: whether an engine has died, and another one has taken its place; together:
        what this rank's engines answer, with the weights of the last push; hold: says which version
        of the weights the engines have.
        """
        self.layout = layout
        self.num_engines = num_engines
        self.group: SpanningGroup | None = None
        self._fleet, self._ranks, self._device = fleet, ranks, device
        self._hosts, self._timeout = hosts, timeout_seconds
        self._replace_dead, self._together, self._hold = replace_dead, together, hold

    def join(self) -> None:
        """See `ReachableEngine`."""
        self._fleet.call("is_there")
        if self._replace_dead():
            raise EngineDied("a rollout engine died before it was given weights")
        hosts = self._hosts
        size = self._ranks.world_size + self.num_engines * self.layout.tp_size
        invitation, listener = None, None
        if self._ranks.is_main:
            towards = hosts[0] if hosts else os.environ.get("MASTER_ADDR", "")
            invitation, listener = open_meeting(towards, size, self._timeout)
        meeting: Any = broadcast_object(invitation)
        nearest = min(self._fleet.clients, default=0)
        own_host = address_towards(hosts[nearest] if hosts else meeting.host)
        self._fleet.send(
            "join",
            lambda n: (meeting, self._workers(n)[0], hosts[n] if hosts else own_host),
        )
        rank, device, reason = self._ranks.rank, self._device.torch_device, ""
        try:
            self.group = SpanningGroup(meeting, rank, device, own_host, listener)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
        self._end_together(reason)

    def _workers(self, number: int) -> range:
        """An engine's ranks in the group, behind the trainer's."""
        first = self._ranks.world_size + number * self.layout.tp_size
        return range(first, first + self.layout.tp_size)

    def plan(self, way_of: Callable[[int], Way]) -> None:
        """See `ReachableEngine`; way_of: rank of a worker in the group -> its part."""
        self._fleet.call("plan", lambda n: ([way_of(rank) for rank in self._workers(n)],))
        if self._replace_dead():
            raise EngineDied("a rollout engine died before it was given weights")

    def receive(self, send: Callable[[], None], version: int) -> None:
        """See `ReachableEngine`; send: this rank's part."""
        self._hold(None)
        self._fleet.send("receive")
        reason = ""
        try:
            send()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
        self._end_together(reason)
        self._hold(version)

    def _end_together(self, reason: str) -> None:
        """What was asked of the engines, and what this rank did beside it, has ended well on all
        ranks; else `EngineDied` on all.
        """
        if self._fleet.why_dead() or reason:
            self.leave()  # who waits for this rank waits no longer
        answers = self._fleet.receive()
        reasons = [reason, self._fleet.why_dead(), *answers.values()]
        found = list(filter(None, gather_from_all(reasons)))
        if self._replace_dead() or found:
            self.leave()
            raise EngineDied(f"weights did not get through: {found[0]}")

    def leave(self) -> None:
        """Close this rank's end of it."""
        if self.group is not None:
            self.group.close()
            self.group = None

    def why_not_in_place(self) -> str:
        """See `ReachableEngine`."""
        found = self._together("why_not_in_place").values()
        return next(filter(None, gather_from_all(list(found))), "")
