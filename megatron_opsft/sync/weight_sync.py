"""Weights between the trainer's shards and the rollout engine, both ways, and proof that they are
the same; and the weights that a run starts from.

A push takes one of two ways. In place: slices of the shards travel to the ranks that need them and
are written into the engine's own parameters, by a schedule that is made once. As a stream: every
rank gets every whole HF tensor in turn and the engine loads them its own way. The first push is
always a stream: its checksums show whether the engine's layout is as the schedule assumes.
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from megatron_opsft.config import SyncConfig
from megatron_opsft.errors import SyncError
from megatron_opsft.model.load import TrainerParts
from megatron_opsft.model.shards import ModelShards
from megatron_opsft.records import Sample, SyncResult
from megatron_opsft.rollout.engine import RolloutEngine
from megatron_opsft.runtime.distributed import (
    broadcast_object,
    gather_from_all,
    max_over_world,
    sum_over_world,
)
from megatron_opsft.storage.hf_files import HfTensors
from megatron_opsft.sync.checksums import differing_parameters
from megatron_opsft.sync.export import Exporter
from megatron_opsft.sync.transfer import Transfer, plan_transfer

log = logging.getLogger("megatron_opsft")

Score = Callable[[Sequence[Sample]], list[tuple[float, ...]]]
"""Log-probabilities of response tokens under the trainer's weights; every rank calls it."""

_ALARM = {"float32": 1e-3, "bfloat16": 0.05}


class WeightSync:
    """Pushes and pulls; `version` says which weights the engine holds: the number of updates
    behind them. Every method is called by every rank.
    """

    def __init__(
        self,
        shards: ModelShards,
        engine: RolloutEngine,
        config: SyncConfig,
        score: Score,
    ) -> None:
        self._shards = shards
        self._engine = engine
        self._config = config
        self._score = score
        self._bucket_bytes = config.bucket_mb * 2**20
        self.exporter = Exporter(shards, self._bucket_bytes)
        self.version = -1
        self._transfer: Transfer | None = None
        self._pull_transfer: Transfer | None = None
        # Engine parameters in an order that only the engine's kernels know.
        self.unverified: frozenset[str] = frozenset()
        dtype = str(shards.dtype).removeprefix("torch.")
        self._alarm = config.logprob_alarm or _ALARM[dtype]

    def push(self, version: int, samples: Sequence[Sample] = ()) -> SyncResult:
        """Trainer -> engine, then the proof that `sync.verify` asks for.

        samples: a few responses to compare log-probabilities on, the same on every rank.
        Errors: `SyncError` on every rank if the engine holds other weights than the trainer, before
        anything is sampled from them.
        """
        first = self.version < 0
        transfer = self._transfer
        if transfer is not None:
            self._engine.begin_update()
            transfer.run()
            self._engine.finish_update(version)
        else:
            self._engine.load_weights(self.exporter.stream(), version)
        self.version = version
        if first or self._config.verify != "off":
            self.compare_checksums(f"sync of weight version {version}", first=first)
        if first:
            self._transfer = self._plan_in_place()
        mean, largest = None, None
        if self._config.verify == "full" and samples:
            mean, largest = self._compare_log_probs(samples)
        return SyncResult(
            version=version,
            path="stream" if transfer is None else "in_place",
            logprob_diff_mean=mean,
            logprob_diff_max=largest,
        )

    def pull(self) -> None:
        """Engine -> trainer: every shard is overwritten from what the engine computes with, bit for
        bit (but -0.0 becomes +0.0 where the engine packs its weights). Checksums prove it.

        The caller then reloads the optimizer's main weights from the model's.
        Errors: `SyncError` where the engine keeps weights in a form that cannot be read, and for
        a difference.
        """
        if self.unverified:
            raise SyncError(
                f"the engine's layout of {min(self.unverified)} is unknown: cannot pull"
            )
        if self._pull_transfer is None:
            self._pull_transfer, _ = plan_transfer(
                self._shards, self._engine, self._bucket_bytes, pull=True
            )
        self._pull_transfer.run()
        self.compare_checksums("pull")

    def _plan_in_place(self) -> Transfer | None:
        """The transfer that later pushes replay, or None (and a line in the log) where some rank's
        engine cannot be written in place.
        """
        if reason := self.why_not_in_place(self.unverified):
            self._say(f"weights go to the engine as a stream of whole tensors: {reason}")
            return None
        transfer, num_bytes = plan_transfer(self._shards, self._engine, self._bucket_bytes)
        self._say(
            f"weights go to the engine in place: at most {num_bytes / 2**20:.1f} MiB sent by a rank"
        )
        return transfer

    def why_not_in_place(self, doubtful: Collection[str]) -> str:
        """Why some rank's engine can be neither read nor written in place; "" where all can.

        doubtful: engine parameters whose layout is not known.
        """
        own = self._engine.weights()
        reason = own.packed
        if not reason and doubtful:
            reason = f"the engine's layout of {min(doubtful)} is unknown"
        dtype = self._shards.dtype
        for parameter in () if reason else self._engine.layout.parameters_of(own.tp_rank):
            found = own.tensors[parameter.name].dtype
            if found != dtype:
                reason = f"the engine holds {parameter.name} in {found}, not in {dtype}"
                break
        return next((reason for reason in gather_from_all([reason]) if reason), "")

    def compare_checksums(self, after: str, *, first: bool = False) -> None:
        """Trainer's and engine's checksums of every engine parameter.

        after: what was done, for the message.
        first: what differs among the parameters whose layout is uncertain becomes `unverified`.
        Errors: `SyncError` on every rank for any other difference.
        """
        reports = differing_parameters(self._shards, self._engine, self.unverified)
        if first:
            self.unverified = (
                frozenset(n for r in reports for n in r) & self._engine.layout.uncertain
            )
            reports = [[name for name in r if name not in self.unverified] for r in reports]
        if bad := {rank: names for rank, names in enumerate(reports) if names}:
            rank, names = next(iter(bad.items()))
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise SyncError(
                f"{after}: the engine of rank {rank} does not hold the trainer's "
                f"{', '.join(names[:3])}{more} (checksums differ, {len(bad)} of {len(reports)} "
                "ranks); nothing was sampled from them"
            )

    def _compare_log_probs(self, samples: Sequence[Sample]) -> tuple[float, float]:
        """Mean and largest absolute difference over all scored tokens of all ranks.

        Errors: `SyncError` on every rank if it is not a number, or is too large and no checksum
        covers every weight.
        """
        scores = self._engine.score(samples)
        (stale,) = max_over_world([scores.stale_tokens])
        if stale:
            raise SyncError(
                f"sync of weight version {self.version}: the engine would have used {stale:.0f} "
                "keys and values that it had cached under the weights before; nothing was sampled"
            )
        if scores.routing:  # engines may round differently, the trainer's ranks must agree
            routing = broadcast_object(scores.routing)
            samples = [replace(s, routing=r) for s, r in zip(samples, routing, strict=True)]
        mine = [
            abs(ours - theirs)
            for a, b in zip(self._score(samples), scores.log_probs, strict=False)
            for ours, theirs in zip(a, b, strict=True)
        ]
        total, count = sum_over_world([math.fsum(mine), len(mine)])
        (largest,) = max_over_world([max(mine, default=0.0)])
        mean = total / count
        if not math.isfinite(mean):
            raise SyncError(
                f"sync of weight version {self.version}: log-probs of the engine or the trainer "
                "are NaN or infinite; nothing was sampled from these weights"
            )
        if mean <= self._alarm:
            return mean, largest
        line = (
            f"after the sync of weight version {self.version} the log-probs of engine and trainer "
            f"differ by {mean:.2g} on average (at most {largest:.2g}); "
            f"sync.logprob_alarm is {self._alarm:.2g}"
        )
        if self.unverified:  # no checksum covers these: nothing says that the weights are right
            raise SyncError(
                f"{line}; the engine's {min(self.unverified)} cannot be checked otherwise"
            )
        if self._shards.layout.is_main:
            log.warning("ALARM: %s", line)
        return mean, largest

    def _say(self, line: str) -> None:
        if self._shards.layout.is_main:
            log.info(line)


def load_first_weights(parts: TrainerParts, sync: WeightSync, reader: RolloutEngine | None) -> None:
    """Fill every shard and the optimizer's main weights; called by every rank.

    Every rank reads its shards from the model's files, or the engine alone reads them and the
    shards are filled from its parameters. That these are read at the right places is proved before
    anything is sampled or trained. Checksums of both sides show that the pull brought what stands
    at the places of the known layout; the first push then gives the shards to the engine's own
    loader, and the checksums after it are the same only if that puts every weight where the pull
    had found it.

    reader: the engine of `sync`, where it may read the files. The log says why it cannot, and how
    the weights came, in how many seconds of the slowest rank.
    Errors: `SyncError` on every rank where the shards are not what the engine holds.
    """
    is_main = parts.shards.layout.is_main
    if reader is not None:
        reason = "the engine cannot read a Megatron checkpoint"
        if isinstance(parts.stored, HfTensors):
            reason = sync.why_not_in_place(reader.layout.uncertain)
        if reason and is_main:
            log.info("the trainer reads the weights from disk itself: %s", reason)
        reader = None if reason else reader
    files = parts.stored.files()
    start, by = time.perf_counter(), "each rank its own slices"
    if reader is None:
        parts.fill_from_disk()
    else:
        reader.load_files(files, version=0)
        sync.pull()
        parts.trainer.optimizer.reload_model_params()
        by = "by the engine"
    (seconds,) = max_over_world([time.perf_counter() - start])
    if is_main:
        size = sum(file.stat().st_size for file in files) / 1e9
        log.info("weights: read %.3g GB of files in %.1f s, %s", size, seconds, by)
