"""Separate vLLM engines, as the training ranks see them.

Each engine is a process that one rank starts, asks and watches; the other ranks only take part in
deciding, together, that an engine has died. Then its rank starts another one, all ranks push the
current weights again, and what it had been asked is asked again, with the same seeds. Because an
engine's answer depends on the weights and on the request alone, nothing else changes.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from megatron_opsft.errors import EngineDied, UserError
from megatron_opsft.records import Rollout, Sample
from megatron_opsft.rollout.agreement import check_agreement, read_identity
from megatron_opsft.rollout.draft_counts import DraftCounts
from megatron_opsft.rollout.engine import (
    Checksums,
    EngineLayout,
    EngineSettings,
    PromptRequest,
    Replica,
    SamplingSettings,
    Scores,
    Take,
)
from megatron_opsft.rollout.hf.layout import hf_layout
from megatron_opsft.rollout.limits import check_separate
from megatron_opsft.rollout.remote.addresses import Address
from megatron_opsft.rollout.remote.buckets import (
    NewMemory,
    SharedBuckets,
    cuda_memory,
    refusal,
)
from megatron_opsft.rollout.remote.client import Connected, EngineClient
from megatron_opsft.rollout.remote.engine_process import EngineProcess
from megatron_opsft.rollout.remote.gpus import NodeRank, engine_gpus, engine_index
from megatron_opsft.rollout.remote.hosted import HostedEngine
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
from megatron_opsft.runtime.spanning_group import (
    SpanningGroup,
    address_towards,
    open_meeting,
)
from megatron_opsft.transfer.receiver import Way
from megatron_opsft.weights.rules import WeightTable

log = logging.getLogger("megatron_opsft")

T = TypeVar("T")

_MAX_DEATHS = 5  # in a row: an engine that dies so often dies of something that lasts


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """Engines on other nodes, by number, and the secret that they share with this job."""

    addresses: tuple[Address, ...]
    token: str = field(repr=False)


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
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """Called by every rank; returns when all engines are there.

        elsewhere: where engines of other nodes are; by default each rank starts its own.

        push_again: gives a new engine the current weights; called by every rank when one has taken
        a dead one's place.
        Errors: `UserError` for more engines than ranks, for an engine that reads another tokenizer
        or model, and for one that cannot be started.
        """
        check_separate(num_engines, layout.world_size)
        self.version: int | None = None
        self.num_engines = num_engines
        self.group: SpanningGroup | None = None
        self._device = device
        self._elsewhere = elsewhere
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
        self.layout = _layout_of(settings, table, packed_head=packed_head)
        memory = HostMemory if self.reachable else self._choose_memory(device)
        self._buckets = SharedBuckets(bucket_bytes, memory)

    @property
    def _number(self) -> int:
        """Of this rank's engine; 0 where it has none."""
        return next(iter(self.replica.numbers), 0)

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
        """See `RolloutEngine.take_draft_counts`: there are none."""
        return DraftCounts()

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
        for bucket in self._buckets.fill(checked_stream(stream, self.layout.hf_columns)):
            client.send("update", bucket)
            under_way += 1
            if under_way == 2:
                client.receive()
                under_way -= 1
        for _ in range(under_way):
            client.receive()
        client.call("finish_update")

    @property
    def reachable(self) -> "RemoteEngine | None":
        """Itself, where its workers get their weights over a group that they share with the
        training ranks.
        """
        return self if self._elsewhere is not None or self._settings.engine != "vllm" else None

    def join(self) -> None:
        """See `ReachableEngine`."""
        _, died = self._attempt(lambda client: client.call("is_there"))
        if self._replace_dead(died):
            raise EngineDied("a rollout engine died before it was given weights")
        others = () if self._elsewhere is None else self._elsewhere.addresses
        size = self._layout.world_size + self.num_engines * self._settings.tp
        invitation, listener = None, None
        if self._layout.is_main:
            towards = others[0].host if others else os.environ.get("MASTER_ADDR", "")
            invitation, listener = open_meeting(towards, size, self._timeout)
        meeting: Any = broadcast_object(invitation)
        own_host = address_towards(others[self._number].host if others else meeting.host)
        engine_host = others[self._number].host if others else own_host
        first = self._layout.world_size + self._number * self._settings.tp
        _, died = self._attempt(lambda client: client.send("join", meeting, first, engine_host))
        rank, device, reason = self._layout.rank, self._device.torch_device, ""
        try:
            self.group = SpanningGroup(meeting, rank, device, own_host, listener)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
        self._end_together(died, reason)

    def plan(self, way_of: Callable[[int], Way]) -> None:
        """See `ReachableEngine`; way_of: rank of a worker in the group -> its part."""
        first = self._layout.world_size + self._number * self._settings.tp
        tp = self._settings.tp
        _, died = self._attempt(
            lambda client: client.call("plan", [way_of(first + n) for n in range(tp)])
        )
        if self._replace_dead(died):
            raise EngineDied("a rollout engine died before it was given weights")

    def receive(self, send: Callable[[], None], version: int) -> None:
        """See `ReachableEngine`; send: this rank's part."""
        self.version = None
        _, died = self._attempt(lambda client: client.send("receive"))
        reason = ""
        try:
            send()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
        self._end_together(died, reason)
        self.version = version

    def _end_together(self, died: EngineDied | None, reason: str) -> None:
        """What was asked of the engines, and what this rank did beside it, has ended well on all
        ranks; else `EngineDied` on all.
        """
        if died is not None or reason:
            self.leave_group()  # who waits for this rank waits no longer
        if died is None:
            answer, died = self._attempt(lambda client: client.receive())
            reason = reason or answer or ""
        reasons = gather_from_all([reason])
        if self._replace_dead(died) or any(reasons):
            self.leave_group()
            raise EngineDied(f"weights did not get through: {next(filter(None, reasons), died)}")

    def leave_group(self) -> None:
        """Close this rank's end of it."""
        if self.group is not None:
            self.group.close()
            self.group = None

    def why_not_in_place(self) -> str:
        """See `ReachableEngine`."""
        found = self._together(lambda client: client.call("why_not_in_place"))
        return next(filter(None, gather_from_all([found or ""])), "")

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
        self.leave_group()

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
        self.leave_group()
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
                    self._client = None
                try:
                    self._client = EngineClient(self._connect, self._timeout)
                    self._introduce(self._client)
                except EngineDied as death:
                    died = death
            reports = [str(d) for d in gather_from_all([died]) if d is not None]
            if not reports:
                return
            wanted = died is not None
        raise UserError(f"a rollout engine cannot be started: {reports[0]}")

    def _connect(self, context: Any) -> Connected:
        if self._elsewhere is None:
            return EngineProcess(context, self._log_file(), self._gpus())
        address = self._elsewhere.addresses[self._number]
        return HostedEngine(context, address, self._elsewhere.token, self._timeout)

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


def _layout_of(settings: EngineSettings, table: WeightTable, *, packed_head: bool) -> EngineLayout:
    if settings.engine == "vllm":
        return vllm_layout(table, settings.tp, packed_head=packed_head)
    return hf_layout(table.hf_shapes())
