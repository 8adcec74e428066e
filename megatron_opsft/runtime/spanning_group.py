"""A process group that is not the job's: training ranks and engine workers, on any nodes.

It has a store and connections of its own, at the addresses by which its members know each other and
at no other. It may lose members: then all that are left close it, and make another one.
"""

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_LOCAL = "localhost"

Message = tuple[int, Tensor]
"""A rank, and what goes to it or comes from it."""


class PointToPoint(Protocol):
    """Ranks that can send each other tensors."""

    def connect(self, like: Tensor) -> None:
        """Called by every rank before the first message; like: of the messages' device."""

    def exchange(
        self, receives: Sequence[Message], sends: Sequence[Message], tag: int
    ) -> Sequence[dist.Work]:
        """Post these messages at once; tensors are contiguous, and alive until the works end.

        Several between the same two ranks are listed in the same order on both.
        """


class JobGroup:
    """The job's own ranks."""

    def connect(self, like: Tensor) -> None:
        """NCCL wants a collective of all ranks before messages between some of them."""
        dist.all_reduce(like.new_zeros(1, dtype=torch.uint8))

    def exchange(
        self, receives: Sequence[Message], sends: Sequence[Message], tag: int
    ) -> Sequence[dist.Work]:
        """See `PointToPoint.exchange`."""
        operations = [dist.P2POp(dist.irecv, tensor, peer, tag=tag) for peer, tensor in receives]
        operations += [dist.P2POp(dist.isend, tensor, peer, tag=tag) for peer, tensor in sends]
        return dist.batch_isend_irecv(operations) if operations else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the members of a group find each other: a store that rank 0 holds.

    size: how many they are. timeout_seconds: of every message, and of the meeting itself.
    """

    host: str
    port: int
    size: int
    timeout_seconds: float


class SpanningGroup:
    """One member's end; each of its `Meeting.size` members makes one at the same time.

    Errors, of every method: RuntimeError where a member is lost or silent.
    """

    def __init__(
        self,
        meeting: Meeting,
        rank: int,
        device: torch.device,
        own_host: str,
        listener: socket.socket | None = None,
    ) -> None:
        """own_host: this machine's name or address in the network of the group; Gloo listens there
        alone. listener: rank 0's, of which the store is made.
        """
        self.rank, self.size = rank, meeting.size
        timeout = timedelta(seconds=meeting.timeout_seconds)
        self._store: dist.TCPStore | None = dist.TCPStore(
            meeting.host,
            meeting.port,
            is_master=listener is not None,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
        self._device = device
        self._group: Any = None
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(self._store, rank, meeting.size, options)
            self._group.allreduce([torch.zeros(1, device=device)]).wait()
        else:
            gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._timeout = timeout
            gloo._devices = [_gloo_device(own_host)]
            self._group = dist.ProcessGroupGloo(self._store, rank, meeting.size, gloo)

    def connect(self, like: Tensor) -> None:
        """NCCL's members are connected from the start, Gloo's when they have something to say."""

    def exchange(
        self, receives: Sequence[Message], sends: Sequence[Message], tag: int
    ) -> Sequence[dist.Work]:
        """See `PointToPoint.exchange`."""
        if self._group is None:
            raise RuntimeError("the group is closed")
        works: list[dist.Work] = []
        if not (receives or sends):
            return works
        with self._as_one(works):
            works += [self._group.recv([tensor], peer, tag) for peer, tensor in receives]
            works += [self._group.send([tensor], peer, tag) for peer, tensor in sends]
        return works

    @contextlib.contextmanager
    def _as_one(self, works: list[dist.Work]) -> Iterator[None]:
        """NCCL's messages of one round must be posted as one."""
        if self._device.type != "cuda":
            yield
            return
        self._group._start_coalescing(self._device)
        yield
        works[:] = [self._group._end_coalescing(self._device)]

    def close(self) -> None:
        """Let go of all connections, so that whoever waits for this member hears of it."""
        if self._group is not None:
            with contextlib.suppress(RuntimeError):
                self._group.abort()
        self._group = self._store = None


def _gloo_device(own_host: str) -> Any:
    """Of the interface that the site names, else of the machine's address in this network."""
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        return dist.ProcessGroupGloo.create_device(interface=interface, lazy_init=True)
    return dist.ProcessGroupGloo.create_device(hostname=own_host, lazy_init=True)


def address_towards(host: str) -> str:
    """This machine's address in the network in which it reaches `host`. Sends nothing.

    Errors: OSError for a name that nobody knows.
    """
    family, kind, _, _, address = socket.getaddrinfo(host or _LOCAL, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def open_meeting(towards: str, size: int, timeout_seconds: float) -> tuple[Meeting, socket.socket]:
    """What rank 0 invites to: a listener at its address in the network of `towards`, no other."""
    host = address_towards(towards)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    meeting = Meeting(host=host, port=port, size=size, timeout_seconds=timeout_seconds)
    return meeting, listener
