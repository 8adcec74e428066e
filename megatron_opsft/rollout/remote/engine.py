"""Separate engines, as the training ranks see them: processes on this node, or on others.

A rank starts, asks and watches its own (`fleet`); the others only take part in deciding, together,
that an engine has died. Then its rank starts another one, all ranks push the current weights again,
and what it had been asked is asked again.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_opsft.errors import EngineDied, EnginesLost
from megatron_opsft.records import Rollout, Sample
from megatron_opsft.rollout.draft_counts import DraftCounts, sum_counts
from megatron_opsft.rollout.engine import (
    Checksums,
    EngineLayout,
    EngineSettings,
    Replica,
    SamplingSettings,
    Scores,
    Take,
)
from megatron_opsft.rollout.hf.layout import hf_layout
from megatron_opsft.rollout.remote.buckets import SharedBuckets
from megatron_opsft.rollout.remote.fleet import MAX_DEATHS, Arguments, Fleet
from megatron_opsft.rollout.remote.gpus import engines_of
from megatron_opsft.rollout.remote.group import EngineGroup
from megatron_opsft.rollout.remote.starts import Elsewhere, EngineStarts
from megatron_opsft.rollout.remote.stream import FleetStream
from megatron_opsft.rollout.remote.weights_memory import choose_memory
from megatron_opsft.rollout.requests import PromptRequest
from megatron_opsft.rollout.responses import Decoder, make_rollouts
from megatron_opsft.rollout.vllm.layout import checked_stream, vllm_layout
from megatron_opsft.runtime.device import Device
from megatron_opsft.runtime.distributed import Layout, broadcast_object
from megatron_opsft.runtime.shared_memory import HostMemory
from megatron_opsft.weights.rules import WeightTable


class RemoteEngine:
    """`RolloutEngine`; which engines belong to a rank: `gpus.engines_of`."""

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
        Errors: `UserError` for an engine that reads another tokenizer or model, and for one that
        cannot be started.
        """
        self.version: int | None = None
        self._push_again = push_again
        self.tokenizer = tokenizer
        self._settings = settings
        self._log_dir = log_dir
        numbers = tuple(engines_of(layout.rank, layout.world_size, num_engines))
        self.replica = Replica(numbers=numbers, count=num_engines, answers=bool(numbers))
        starts = EngineStarts(
            settings=settings,
            table=table,
            num_engines=num_engines,
            timeout_seconds=timeout_seconds,
            log_dir=log_dir,
            elsewhere=elsewhere,
        )
        self.fleet = Fleet(numbers, starts.connect, starts.introduce, timeout_seconds)
        self._stream = FleetStream(self.fleet, settings.batch_size)
        packed_head = broadcast_object(starts.packs_head)  # rank 0 always has an engine
        self.layout = _layout_of(settings, table, packed_head=packed_head)
        self._group: EngineGroup | None = None
        if elsewhere is not None or settings.engine != "vllm":
            hosts = () if elsewhere is None else [each.host for each in elsewhere.addresses]
            self._group = self._open_group(layout, device, hosts, timeout_seconds)
        memory = (
            HostMemory if self._group else choose_memory(self.fleet, device, is_main=layout.is_main)
        )
        self._buckets = SharedBuckets(bucket_bytes, memory)

    def _open_group(
        self, layout: Layout, device: Device, hosts: Sequence[str], timeout_seconds: float
    ) -> EngineGroup:
        """Of the training ranks and all engines; hosts: of engines on other nodes."""
        return EngineGroup(
            self.fleet,
            self.layout,
            layout,
            device,
            hosts=hosts,
            num_engines=self.replica.count,
            timeout_seconds=timeout_seconds,
            replace_dead=self._replace_dead,
            together=self._together,
            hold=self._hold,
        )

    @property
    def pids(self) -> list[int]:
        """Process ids of this rank's engines, on their nodes."""
        return [client.pid for client in self.fleet.clients.values()]

    def generate(
        self, prompts: Sequence[PromptRequest], sampling: SamplingSettings
    ) -> list[Rollout]:
        """See `RolloutEngine.generate`. RuntimeError before the first complete update."""
        self._check_version()
        numbers = self.replica.numbers
        share_of = {n: prompts[k :: len(numbers)] for k, n in enumerate(numbers)}
        answers = self._together("sample", lambda n: (share_of[n], sampling))
        rollouts = [self._rollouts(share_of[n], answers[n], sampling) for n in numbers]
        found = {(r.problem_id, r.sample_index): r for part in rollouts for r in part}
        return [found[p.problem_id, i] for p in prompts for i in p.sample_indices]

    def stream(self, take: Take, sampling: SamplingSettings) -> Iterator[list[Rollout]]:
        """See `StreamingEngine.stream`. Every rank must come to its end."""
        for _ in range(MAX_DEATHS):
            yield from self.stream_once(take, sampling)
            if not self.recover():
                return
        raise EnginesLost(self._too_many_deaths())

    def stream_once(self, take: Take, sampling: SamplingSettings) -> Iterator[list[Rollout]]:
        """See `BackgroundEngine`."""
        self._check_version()
        for ended in self._stream.run(take, sampling):
            requests, responses = [single for single, _ in ended], [ids for _, ids in ended]
            yield self._rollouts(requests, responses, sampling)

    def recover(self) -> bool:
        """See `BackgroundEngine`."""
        if not self._replace_dead():
            return False
        self._push_again()
        return True

    def _rollouts(
        self,
        requests: Sequence[PromptRequest],
        responses: Sequence[Sequence[int]],
        sampling: SamplingSettings,
    ) -> list[Rollout]:
        assert self.version is not None
        return make_rollouts(
            requests,
            responses,
            end_token_ids=sampling.end_token_ids,
            tokenizer=self.tokenizer,
            version=self.version,
        )

    def _check_version(self) -> None:
        if self.version is None:
            raise RuntimeError("the rollout engine holds no complete set of weights")

    def take_draft_counts(self) -> DraftCounts:
        """See `RolloutEngine.take_draft_counts`; called by every rank."""
        if not self._settings.speculates:
            return DraftCounts()
        return sum_counts(list(self._together("draft_counts").values()))

    def score(self, samples: Sequence[Sample]) -> Scores:
        """See `RolloutEngine.score`; empty on a rank without an engine. Of several engines each
        answers for some of the samples.
        """
        scores = list(self._together("score", partial(_given, samples)).values())
        return Scores(
            log_probs=tuple(
                scores[place % len(scores)].log_probs[place]
                for place in range(len(samples) if scores else 0)
            ),
            stale_tokens=sum(each.stale_tokens for each in scores),
        )

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `RolloutEngine.load_weights`. `EngineDied` on every rank if an engine died of it: by
        then another one is there, and wants the whole stream.
        """
        self.version = None
        stream = iter(tensors)
        if self.fleet.clients:
            self._send(stream)
        for _ in stream:  # it is collective: every rank must see its end
            pass
        if self._replace_dead():
            raise EngineDied("a rollout engine died while it was given weights")
        self.version = version

    def _send(self, stream: Iterator[tuple[str, Tensor]]) -> None:
        self.fleet.call("begin_update")
        under_way = 0
        for bucket in self._buckets.fill(checked_stream(stream, self.layout.hf_columns)):
            self.fleet.send("update", partial(_given, bucket))
            under_way += 1
            if under_way == 2:
                self.fleet.receive()
                under_way -= 1
        for _ in range(under_way):
            self.fleet.receive()
        self.fleet.call("finish_update")

    @property
    def reachable(self) -> EngineGroup | None:
        """None where its workers read their weights from memory that they share with this rank."""
        return self._group

    def parameters(self, name: str) -> list[Tensor]:
        """A parameter of the first engine, of each of its tensor-parallel ranks in order.

        On rank 0, which has that engine; empty elsewhere.
        """
        return self._together("parameter", partial(_given, name)).get(0, [])

    def checksums(self, cuts: int) -> Checksums:
        """See `RolloutEngine.checksums`; empty on a rank without an engine. Where its engines
        differ, some are wrong: no checksum is given.
        """
        found = list(self._together("checksums", partial(_given, cuts)).values())
        if not found:
            return Checksums(of_rank={})
        merged = {
            tp_rank: [
                of_engines[0] if len(set(of_engines)) == 1 else None
                for of_engines in zip_longest(*(each.of_rank[tp_rank] for each in found))
            ]
            for tp_rank in found[0].of_rank
        }
        return Checksums(
            of_rank=merged,
            signed_zeros=all(each.signed_zeros for each in found),
            draft_fault=next((each.draft_fault for each in found if each.draft_fault), ""),
        )

    def sleep(self) -> None:
        """Nothing: the engine's devices are its own."""

    def close(self) -> None:
        """End the engine processes."""
        self.fleet.close()
        self._buckets.close()
        if self._group is not None:
            self._group.leave()

    def _together(self, method: str, arguments: Arguments = lambda number: ()) -> dict[int, Any]:
        """What this rank's engines answer, by number; asked again for as long as any engine dies of
        it. Called by every rank.
        """
        for _ in range(MAX_DEATHS):
            answers = self.fleet.call(method, arguments)
            if not self.recover():
                return answers
        raise EnginesLost(self._too_many_deaths())

    def _too_many_deaths(self) -> str:
        return f"rollout engines died {MAX_DEATHS} times in a row; see the logs in {self._log_dir}"

    def _replace_dead(self) -> bool:
        """See `Fleet.replace_dead`; nobody is in a group any more then."""
        if not self.fleet.replace_dead():
            return False
        if self._group is not None:
            self._group.leave()
        self.version = None
        return True

    def _hold(self, version: int | None) -> None:
        self.version = version


def _given(argument: Any, number: int) -> tuple[Any, ...]:
    """The same for every engine."""
    return (argument,)


def _layout_of(settings: EngineSettings, table: WeightTable, *, packed_head: bool) -> EngineLayout:
    if settings.engine == "vllm":
        return vllm_layout(table, settings.tp, packed_head=packed_head)
    return hf_layout(table.hf_shapes())
