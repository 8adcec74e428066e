"""Separate vLLM engines, as the training ranks see them.

Each engine is a process that one rank starts, asks and watches; the other ranks only take part in
deciding, together, that an engine has died. Then its rank starts another one, all ranks push the
current weights again, and what it had been asked is asked again, with the same seeds. Because an
engine's answer depends on the weights and on the request alone, nothing else changes.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from megatron_opsft.errors import EngineDied, UserError
from megatron_opsft.records import Rollout, Sample
from megatron_opsft.rollout.agreement import check_agreement, read_identity
from megatron_opsft.rollout.draft_counts import DraftCounts
from megatron_opsft.rollout.engine import (
    Checksums,
    EngineSettings,
    PromptRequest,
    Replica,
    SamplingSettings,
    Scores,
    Take,
)
from megatron_opsft.rollout.limits import check_separate
from megatron_opsft.rollout.remote.buckets import (
    NewMemory,
    SharedBuckets,
    cuda_memory,
    refusal,
)
from megatron_opsft.rollout.remote.client import EngineClient
from megatron_opsft.rollout.remote.gpus import NodeRank, engine_gpus, engine_index
from megatron_opsft.rollout.responses import Decoder, make_rollouts
from megatron_opsft.rollout.vllm.layout import checked_stream, vllm_layout
from megatron_opsft.runtime.device import Device
from megatron_opsft.runtime.distributed import (
    Layout,
    any_over_world,
    broadcast_object,
    gather_from_all,
)
from megatron_opsft.runtime.shared_memory import HostMemory
from megatron_opsft.weights.rules import WeightTable

log = logging.getLogger("megatron_opsft")

T = TypeVar("T")

_MAX_DEATHS = 5  # in a row: an engine that dies so often dies of something that lasts


class RemoteEngine:
    """`RolloutEngine`; engine number e belongs to rank e * world size / number of engines."""

    in_place = None

    def __init__(
        self,
        settings: EngineSettings,
        table: WeightTable,
        tokenizer: Decoder,
        layout: Layout,
        device: Device,
        *,
        num_engines: int,
        timeout_seconds: float,
        log_dir: Path,
        bucket_bytes: int,
        push_again: Callable[[], object],
    ) -> None:
        """Called by every rank; returns when all engines are there.

        push_again: gives a new engine the current weights; called by every rank when one has taken
        a dead one's place.
        Errors: `UserError` for more engines than ranks, for an engine that reads another tokenizer
        or model, and for one that cannot be started.
        """
        check_separate(num_engines, layout.world_size)
        self.version: int | None = None
        self._push_again = push_again
        self.tokenizer = tokenizer
        self._settings = settings
        self._table = table
        self._layout = layout
        self._timeout = timeout_seconds
        self._log_dir = log_dir
        index = engine_index(layout.rank, layout.world_size, num_engines)
        self.replica = Replica(
            numbers=() if index is None else (index,),
            count=num_engines,
            answers=index is not None,
        )
        self._client: EngineClient | None = None
        self._packs_head = False
        self._start_engines(index is not None, tries=1)
        packed_head = broadcast_object(self._packs_head)  # rank 0 always has an engine
        self.layout = vllm_layout(table, settings.tp, packed_head=packed_head)
        self._buckets = SharedBuckets(bucket_bytes, self._choose_memory(device))

    @property
    def pid(self) -> int | None:
        """Process id of this rank's engine; None where it has none."""
        return self._client.pid if self._client is not None else None

    def generate(
        self, prompts: Sequence[PromptRequest], sampling: SamplingSettings
    ) -> list[Rollout]:
        """See `RolloutEngine.generate`. RuntimeError before the first complete update."""
        if self.version is None:
            raise RuntimeError("the rollout engine holds no complete set of weights")
        responses = self._together(lambda client: client.call("sample", prompts, sampling))
        if responses is None:
            return []
        return make_rollouts(
            prompts,
            responses,
            end_token_ids=sampling.end_token_ids,
            tokenizer=self.tokenizer,
            version=self.version,
        )

    def stream(self, take: Take, sampling: SamplingSettings) -> Iterator[list[Rollout]]:
        """See `StreamingEngine.stream`; all that is left for this rank's engine at once."""
        mine = take(sys.maxsize) if self.replica.numbers else ()
        yield self.generate(mine, sampling)

    def take_draft_counts(self) -> DraftCounts:
        """See `RolloutEngine.take_draft_counts`; called by every rank."""
        if self._settings.speculation == "off":
            return DraftCounts()
        return self._together(lambda client: client.call("draft_counts")) or DraftCounts()

    def score(self, samples: Sequence[Sample]) -> Scores:
        """See `RolloutEngine.score`; empty on a rank without an engine."""
        scores = self._together(lambda client: client.call("score", samples))
        return scores or Scores(log_probs=(), stale_tokens=0)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `RolloutEngine.load_weights`. `EngineDied` on every rank if an engine died of it: by
        then another one is there, and wants the whole stream.
        """
        self.version = None
        stream = iter(tensors)
        _, died = self._attempt(lambda client: self._send(client, stream))
        for _ in stream:  # it is collective: every rank must see its end
            pass
        if self._replace_dead(died):
            raise EngineDied("a rollout engine died while it was given weights")
        self.version = version

    def _send(self, client: EngineClient, stream: Iterator[tuple[str, Tensor]]) -> None:
        client.call("begin_update")
        under_way = 0
        for bucket in self._buckets.fill(checked_stream(stream, self.layout)):
            client.send("update", bucket)
            under_way += 1
            if under_way == 2:
                client.receive()
                under_way -= 1
        for _ in range(under_way):
            client.receive()
        client.call("finish_update")

    def parameters(self, name: str) -> list[Tensor]:
        """A parameter of the first engine, of each of its tensor-parallel ranks in order.

        On rank 0, which has that engine; empty elsewhere.
        """
        mine = 0 in self.replica.numbers
        found = self._together(lambda client: client.call("parameter", name) if mine else None)
        return found or []

    def checksums(self, cuts: int) -> Checksums:
        """See `RolloutEngine.checksums`; empty on a rank without an engine."""
        found = self._together(lambda client: client.call("checksums", cuts))
        return found or Checksums(of_rank={})

    def sleep(self) -> None:
        """Nothing: the engine's devices are its own."""

    def close(self) -> None:
        """End the engine processes."""
        if self._client is not None:
            self._client.close()
            self._client = None
        self._buckets.close()

    def _together(self, ask: Callable[[EngineClient], T]) -> T | None:
        """What this rank's engine answers, None without one; asked again for as long as any engine
        dies of it. Called by every rank.
        """
        for _ in range(_MAX_DEATHS):
            answer, died = self._attempt(ask)
            if not self._replace_dead(died):
                return answer
            self._push_again()
        raise UserError(
            f"rollout engines died {_MAX_DEATHS} times in a row; see the logs in {self._log_dir}"
        )

    def _attempt(self, ask: Callable[[EngineClient], T]) -> tuple[T | None, EngineDied | None]:
        if self._client is None:
            return None, None
        try:
            return ask(self._client), None
        except EngineDied as died:
            return None, died

    def _replace_dead(self, died: EngineDied | None) -> bool:
        """Whether any rank's engine died; then all have one again, without weights."""
        if not any_over_world(died is not None):
            return False
        if died is not None:
            log.warning("%s; starting another one", died)
        self.version = None
        self._start_engines(died is not None, tries=_MAX_DEATHS)
        return True

    def _start_engines(self, wanted: bool, tries: int) -> None:
        """Start one on every rank that wants one; called by every rank.

        Errors: `UserError` when one has died `tries` times before it was there.
        """
        for _ in range(tries):
            died: EngineDied | None = None
            if wanted:
                if self._client is not None:
                    self._client.close()
                self._client = EngineClient(self._log_file(), self._gpus(), self._timeout)
                _, died = self._attempt(self._introduce)
            reports = [str(d) for d in gather_from_all([died]) if d is not None]
            if not reports:
                return
            wanted = died is not None
        raise UserError(f"a rollout engine cannot be started: {reports[0]}")

    def _introduce(self, client: EngineClient) -> None:
        shape = self._table.shape
        identity, self._packs_head = client.start(self._settings, shape)
        check_agreement(read_identity(self._settings.model_dir, shape.vocab_size), identity)

    def _choose_memory(self, device: Device) -> NewMemory:
        """What weights go through: a GPU's memory where each engine was seen to read it; called by
        every rank.
        """
        if not device.is_cuda:
            return HostMemory
        on_gpu = cuda_memory(device.torch_device)
        reason, died = self._attempt(
            lambda client: refusal(on_gpu, lambda address: client.call("read_shared", address))
        )
        if self._replace_dead(died) and died is not None:
            reason = "the engine died of it"
        if self._layout.is_main:
            log.info(
                "weights go to separate engines through %s",
                f"host memory ({reason})" if reason else "GPU memory (CUDA IPC)",
            )
        return HostMemory if reason else on_gpu

    def _log_file(self) -> Path:
        return self._log_dir / f"engine_{self.replica.numbers[0]}.log"

    def _gpus(self) -> tuple[int, ...]:
        if not self._settings.is_cuda:
            return ()
        return engine_gpus(NodeRank.of_this_process(), self.replica.count, self._settings.tp)
