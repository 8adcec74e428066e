"""The process of a separate vLLM engine: `python -m megatron_opsft.rollout.remote.process ADDRESS`.

It serves one trainer rank, one request at a time, over ZeroMQ, and ends with that rank. While it is
at work it says so about once a second; an engine that is silent for too long is hung.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from torch import Tensor

from megatron_opsft.architectures.shape import ModelShape
from megatron_opsft.errors import UserError
from megatron_opsft.records import Sample
from megatron_opsft.rollout.agreement import Identity, read_identity
from megatron_opsft.rollout.draft_counts import DraftCounts
from megatron_opsft.rollout.engine import (
    Checksums,
    EngineSettings,
    PromptRequest,
    SamplingSettings,
    Scores,
)
from megatron_opsft.rollout.remote.messages import Kind, Reply, Request
from megatron_opsft.rollout.vllm.core import VllmCore
from megatron_opsft.runtime.shared_memory import Address
from megatron_opsft.weights.rules import WeightTable

_BEAT_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


class Service:
    """The methods that a request may name."""

    def __init__(self, beat: Callable[[], None]) -> None:
        self._beat = beat

    def start(self, settings: EngineSettings, shape: ModelShape) -> tuple[Identity, bool]:
        """Build the engine: what it is, and whether it packs the head's weight."""
        self._core = VllmCore(settings, WeightTable(shape))
        identity = read_identity(settings.model_dir, shape.vocab_size)
        return identity, self._core.packs_head

    def sample(
        self, prompts: Sequence[PromptRequest], sampling: SamplingSettings
    ) -> list[list[int]]:
        """See `VllmCore.sample`."""
        return self._core.sample(prompts, sampling, self._beat)

    def score(self, samples: Sequence[Sample]) -> Scores:
        """See `VllmCore.score`."""
        return self._core.score(samples)

    def begin_update(self) -> None:
        """vLLM's weight-transfer API: a new set of weights follows."""
        self._core.rpc("start_weight_update")

    def update(self, bucket: dict[str, Any]) -> None:
        """vLLM's weight-transfer API: one bucket, see `vllm.worker.BucketInfo`."""
        self._core.rpc("update_weights", bucket)
        self._beat()

    def finish_update(self) -> None:
        """vLLM's weight-transfer API: that was all of them."""
        self._core.rpc("finish_weight_update")
        self._core.drop_cache()

    def read_shared(self, address: Address) -> list[bytes | str]:
        """What every worker reads there, or why it cannot."""
        return self._core.rpc("opsft_read_shared", address)

    def draft_counts(self) -> DraftCounts:
        """See `RolloutEngine.take_draft_counts`."""
        return self._core.take_draft_counts()

    def checksums(self, cuts: int) -> Checksums:
        """See `RolloutEngine.checksums`: of all tensor-parallel ranks."""
        return self._core.checksums(cuts)

    def parameter(self, name: str) -> list[Tensor]:
        """One parameter of every tensor-parallel rank, on the CPU."""
        return self._core.rpc("opsft_parameter", name)


def serve(socket: Any, parent: int) -> None:
    """Answer requests until the trainer's rank is gone."""
    last_beat = 0.0

    def beat() -> None:
        nonlocal last_beat
        if time.monotonic() - last_beat > _BEAT_SECONDS:
            last_beat = time.monotonic()
            socket.send_pyobj(Reply(Kind.ALIVE))

    service = Service(beat)
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


def main() -> None:
    """Entry point of the process."""
    parent = os.getppid()
    # Also when the trainer is killed in a way that it cannot clean up after.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.connect(sys.argv[1])
        serve(socket, parent)


if __name__ == "__main__":
    main()
