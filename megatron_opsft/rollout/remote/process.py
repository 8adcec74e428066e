"""What the process of a separate engine does.

It serves one trainer rank, one request at a time, over ZeroMQ, and ends with that rank; in a stream
it takes more work as it comes, and answers one response after the other. While it is at work it
says so about once a second; an engine that is silent for too long is hung.
"""

import ctypes
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from torch import Tensor

from megatron_opsft.architectures.shape import ModelShape
from megatron_opsft.errors import UserError
from megatron_opsft.records import Sample
from megatron_opsft.rollout.agreement import Identity, read_identity
from megatron_opsft.rollout.draft_counts import DraftCounts
from megatron_opsft.rollout.engine import Checksums, EngineSettings, SamplingSettings, Scores
from megatron_opsft.rollout.remote.hf_core import HfCore
from megatron_opsft.rollout.remote.messages import Kind, Reply, Request
from megatron_opsft.rollout.requests import PromptRequest, join_requests, single_requests
from megatron_opsft.rollout.vllm.core import VllmCore
from megatron_opsft.runtime.device import select_device
from megatron_opsft.runtime.shared_memory import Address
from megatron_opsft.runtime.spanning_group import Meeting
from megatron_opsft.transfer.receiver import Way
from megatron_opsft.weights.rules import WeightTable

Tell = Callable[[list[tuple[str, int, list[int]]]], None]

_BEAT_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


class Service:
    """The methods that a request may name."""

    def __init__(self, beat: Callable[[], None], inbox: "Inbox", tell: Tell) -> None:
        """beat: says that there is work; inbox: what comes during a stream; tell: what ends."""
        self._beat, self._inbox, self._tell = beat, inbox, tell

    def start(self, settings: EngineSettings, shape: ModelShape) -> tuple[Identity, bool]:
        """Build the engine: what it is, and whether it packs the head's weight."""
        table = WeightTable(shape)
        self._core: VllmCore | HfCore
        if settings.engine == "vllm":
            self._core = VllmCore(settings, table)
        else:
            device = select_device("cuda" if settings.is_cuda else "cpu")
            self._core = HfCore(settings, table, device)
        identity = read_identity(settings.model_dir, shape.vocab_size)
        return identity, self._core.packs_head

    def sample(
        self, prompts: Sequence[PromptRequest], sampling: SamplingSettings
    ) -> list[list[int]]:
        """See `VllmCore.sample`."""
        return self._core.sample(prompts, sampling, self._beat)

    def stream(self, sampling: SamplingSettings) -> None:
        """Responses to what is added meanwhile; each is told as it ends."""
        for ended in self._core.stream(self._inbox.open(self._core.batch_size), sampling):
            self._beat()
            if ended:
                self._tell([(s.problem_id, s.sample_indices[0], ids) for s, ids in ended])

    def score(self, samples: Sequence[Sample]) -> Scores:
        """See `VllmCore.score`."""
        return self._core.score(samples)

    def is_there(self) -> None:
        """Nothing."""

    def join(self, meeting: Meeting, first_rank: int, own_host: str) -> str:
        """Its workers become ranks of a group; why not, else "". first_rank: of the first one."""
        return self._core.join(meeting, first_rank, own_host)

    def plan(self, ways: Sequence[Way]) -> None:
        """What `receive` does from now on; a way for each worker."""
        self._core.plan(ways)

    def receive(self) -> str:
        """Weights over the group; why they did not get through, else ""."""
        return self._core.receive()

    def why_not_in_place(self) -> str:
        """Why its parameters cannot be written as they are; "" where they can."""
        return self._core.why_not_in_place()

    def begin_update(self) -> None:
        """vLLM's weight-transfer API: a new set of weights follows."""
        self._vllm.rpc("start_weight_update")

    def update(self, bucket: dict[str, Any]) -> None:
        """vLLM's weight-transfer API: one bucket, see `vllm.worker.BucketInfo`."""
        self._vllm.rpc("update_weights", bucket)
        self._beat()

    def finish_update(self) -> None:
        """vLLM's weight-transfer API: that was all of them."""
        self._vllm.rpc("finish_weight_update")
        self._vllm.drop_cache()

    def read_shared(self, address: Address) -> list[bytes | str]:
        """What every worker reads there, or why it cannot."""
        return self._vllm.rpc("opsft_read_shared", address)

    @property
    def _vllm(self) -> VllmCore:
        assert isinstance(self._core, VllmCore)
        return self._core

    def draft_counts(self) -> DraftCounts:
        """See `RolloutEngine.take_draft_counts`."""
        return self._core.take_draft_counts()

    def checksums(self, cuts: int) -> Checksums:
        """See `RolloutEngine.checksums`: of all tensor-parallel ranks."""
        return self._core.checksums(cuts)

    def parameter(self, name: str) -> list[Tensor]:
        """One parameter of every tensor-parallel rank, on the CPU."""
        return self._core.parameter(name)


class Inbox:
    """Requests that come while a stream goes on."""

    def __init__(self, socket: Any, wait: Callable[[], None]) -> None:
        """wait: returns when there is something to be read."""
        self._socket, self._wait = socket, wait

    def open(self, batch_size: int) -> Callable[[int], list[PromptRequest] | None]:
        """A source of work for `core.stream`. An engine with nothing to do waits here."""
        waiting: deque[PromptRequest] = deque()
        is_open = True

        def take(room: int) -> list[PromptRequest] | None:
            nonlocal is_open
            idle = room == batch_size
            while is_open and (self._socket.poll(0) or (idle and not waiting)):
                self._wait()
                request: Request = self._socket.recv_pyobj()
                added = single_requests(request.arguments[0])
                is_open = bool(added)
                waiting.extend(added)
            if not waiting:
                return None if is_open else []
            return join_requests([waiting.popleft() for _ in range(min(room, len(waiting)))])

        return take


def serve(socket: Any, parent: int) -> None:
    """Answer requests until the trainer's rank is gone."""
    last_beat = 0.0

    def beat() -> None:
        nonlocal last_beat
        if time.monotonic() - last_beat > _BEAT_SECONDS:
            last_beat = time.monotonic()
            socket.send_pyobj(Reply(Kind.ALIVE))

    def wait() -> None:
        while not socket.poll(1000):
            if os.getppid() != parent:
                raise SystemExit
            beat()

    def tell(ended: Any) -> None:
        socket.send_pyobj(Reply(Kind.ENDED, ended))

    service = Service(beat, Inbox(socket, wait), tell)
    while True:
        while not socket.poll(1000):
            if os.getppid() != parent:
                return
        request: Request = socket.recv_pyobj()
        try:
            reply = Reply(Kind.RESULT, getattr(service, request.method)(*request.arguments))
        except UserError as error:
            reply = Reply(Kind.ERROR, str(error))
        socket.send_pyobj(reply)


def main(address: str) -> None:
    """Entry point of the process; address: of the socket that its trainer has bound."""
    parent = os.getppid()
    # Also when the trainer is killed in a way that it cannot clean up after.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.connect(address)
        serve(socket, parent)
