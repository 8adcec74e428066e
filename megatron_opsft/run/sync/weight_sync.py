"""Weights between the trainer's shards and the rollout engine, both ways, and proof that they are
the same; and the weights that a run starts from.

The first push is a stream: every rank gets every whole HF tensor in turn, and the engine loads them
its own way. Its checksums show that the engine's layout is as described. From then on slices of the
shards travel to the ranks that need them and are written into the engine's own parameters, by a
schedule that is made once.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from megatron_opsft.config import SyncConfig
from megatron_opsft.errors import SyncError, UserError
from megatron_opsft.models.architectures.template import ShardKind
from megatron_opsft.models.storage.hf_files import HfTensors
from megatron_opsft.models.weights.checksum import (
    expected_checksums,
    parameter_checksums,
)
from megatron_opsft.models.weights.rectangles import Copy
from megatron_opsft.models.weights.slicing import shard_parameter
from megatron_opsft.records import Sample, SyncResult
from megatron_opsft.rollout.engine import RolloutEngine
from megatron_opsft.run.sync.export import Exporter
from megatron_opsft.run.sync.transfer import Transfer, plan_transfer
from megatron_opsft.runtime.distributed import (
    broadcast_object,
    gather_from_all,
    max_over_world,
    sum_over,
    sum_over_world,
)
from megatron_opsft.trainer.model.load import TrainerParts
from megatron_opsft.trainer.model.shards import ModelShards

log = logging.getLogger("megatron_opsft")

Score = Callable[[Sequence[Sample]], list[tuple[float, ...]]]
"""Log-probabilities of response tokens under the trainer's weights; every rank calls it."""

_ALARM = {torch.float32: 1e-3, torch.bfloat16: 0.05}
_NO_ROUNDING = 10  # times the alarm: two models, not one in another order of sums


@dataclass(eq=False)
class WeightSync:
    """Pushes and pulls; `version` says which weights the engine holds: the number of updates
    behind them. Every method is called by every rank.
    """

    shards: ModelShards
    engine: RolloutEngine
    config: SyncConfig
    score: Score
    version: int = field(default=-1, init=False)
    _transfer: Transfer | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.exporter = Exporter(self.shards)

    def push(self, version: int, samples: Sequence[Sample] = ()) -> SyncResult:
        """Trainer -> engine, then the proof that `sync.verify` asks for.

        samples: a few responses to compare log-probabilities on, the same on every rank.
        Errors: `SyncError` on every rank if the engine holds other weights than the trainer, before
        anything is sampled from them. `UserError` on every rank if the first push shows that engine
        and trainer compute different models from the same weights.
        """
        first = self._transfer is None
        if self._transfer is None:
            self.engine.load_weights(self.exporter.stream(), version)
        else:
            self.engine.begin_update()
            self._transfer.run()
            self.engine.finish_update(version)
        self.version = version
        if first or self.config.verify != "off":
            self.compare_checksums(f"sync of weight version {version}")
        if first:
            bucket_mb = self.config.bucket_mb
            self._transfer, num_bytes = plan_transfer(
                self.shards, self.engine, bucket_mb
            )
            if self.shards.layout.is_main:
                size = f"{num_bytes / 2**20:.1f} MiB"
                log.info(
                    "weights go to the engine in place: at most %s sent by a rank", size
                )
        mean, largest = None, None
        if self.config.verify == "full" and samples:
            mean, largest = self._compare_log_probs(samples)
            if first:
                self._check_one_model(mean)
        return SyncResult(
            version=version,
            path="stream" if first else "in_place",
            logprob_diff_mean=mean,
            logprob_diff_max=largest,
        )

    def close(self) -> None:
        """Let go of the engine's parameters: an engine that is closed next can then free them."""
        self._transfer = None

    def pull(self) -> None:
        """Engine -> trainer: every shard is overwritten from what the engine computes with, bit for
        bit. Checksums prove it.

        The caller then reloads the optimizer's main weights from the model's.
        Errors: `SyncError` for a difference.
        """
        bucket_mb = self.config.bucket_mb
        transfer, _ = plan_transfer(self.shards, self.engine, bucket_mb, pull=True)
        transfer.run()
        self.compare_checksums("pull")

    def compare_checksums(self, after: str) -> None:
        """Trainer's and engine's checksums of every engine parameter.

        after: what was done, for the message. Errors: `SyncError` on every rank for a difference.
        """
        reports = differing_parameters(self.shards, self.engine)
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

        Errors: `SyncError` on every rank if it is not a number.
        """
        scores = self.engine.score(samples)
        (stale,) = max_over_world([scores.stale_tokens])
        if stale:
            raise SyncError(
                f"sync of weight version {self.version}: the engine would have used {stale:.0f} "
                "keys and values that it had cached under the weights before; nothing was sampled"
            )
        if (
            scores.routing
        ):  # engines may round differently, the trainer's ranks must agree
            routing = broadcast_object(scores.routing)
            samples = [
                replace(s, routing=r) for s, r in zip(samples, routing, strict=True)
            ]
        mine = [
            abs(ours - theirs)
            for a, b in zip(self.score(samples), scores.log_probs, strict=False)
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
        if mean > (alarm := self._alarm) and self.shards.layout.is_main:
            log.warning(
                "ALARM: after the sync of weight version %d the log-probs of engine and trainer "
                "differ by %.2g on average (at most %.2g); sync.logprob_alarm is %.2g",
                *(self.version, mean, largest, alarm),
            )
        return mean, largest

    @property
    def _alarm(self) -> float:
        return self.config.logprob_alarm or _ALARM[self.shards.dtype]

    def _check_one_model(self, mean: float) -> None:
        """mean: difference of log-probs of engine and trainer, with weights that are the same."""
        if mean > _NO_ROUNDING * self._alarm:
            raise UserError(
                "engine and trainer hold the same weights, but their log-probs differ by "
                f"{mean:.2g} on average, more than {_NO_ROUNDING} times "
                f"sync.logprob_alarm={self._alarm:g}, which rounding cannot explain: one of "
                "them ignores something in the model's config.json; take another "
                "rollout.engine, or raise sync.logprob_alarm to sample from another model"
            )


def differing_parameters(shards: ModelShards, engine: RolloutEngine) -> list[list[str]]:
    """By rank: the parameters of its engine whose checksum is not the trainer's.

    Collective over the world.
    Errors: `SyncError` on every rank where an engine's draft model is not as it was loaded.
    """
    if fault := next(filter(None, gather_from_all([engine.draft_fault()])), ""):
        raise SyncError(f"{fault}; nothing was sampled with it")
    layout = engine.layout
    held, tensors = _answered_for(shards), shards.by_name
    found = parameter_checksums(layout.parameters_of(layout.tp_rank), engine.weights())
    wrong: list[str] = []
    for tp_rank in range(layout.tp_size):
        parameters = layout.parameters_of(tp_rank)
        mine = expected_checksums(parameters, held, tensors)
        expected = sum_over(mine.cpu().clone()).tolist()
        if tp_rank == layout.tp_rank:
            pairs = zip(parameters, found, expected, strict=True)
            wrong = [parameter.name for parameter, a, b in pairs if a != b]
    return gather_from_all([wrong])


def _answered_for(shards: ModelShards) -> Mapping[str, Sequence[Copy]]:
    """HF name -> what this rank answers for: replicas share the work, each part has one."""
    layout = shards.layout
    held: dict[str, list[Copy]] = {}
    for index, (rule, _) in enumerate(shards.parameters):
        shard = layout.shard(is_expert=rule.is_expert)
        is_repeated = rule.replica or (
            rule.kind is ShardKind.COPY and shard.tp_rank > 0
        )
        if is_repeated or index % shard.num_copies != shard.copy_rank:
            continue
        for part in shard_parameter(rule, shard.tp_rank, shard.tp_size).copies:
            held.setdefault(part.source.tensor, []).append(part)
    return held


def load_first_weights(
    parts: TrainerParts, sync: WeightSync, reader: RolloutEngine | None
) -> None:
    """Fill every shard and the optimizer's main weights; called by every rank.

    Every rank reads its shards from the model's files, or the engine alone reads them and the
    shards are filled from its parameters. That these are read at the right places is proved before
    anything is sampled or trained. Checksums of both sides show that the pull brought what stands
    at the places of the known layout; the first push then gives the shards to the engine's own
    loader, and the checksums after it are the same only if that puts every weight where the pull
    had found it.

    reader: the engine of `sync`, where it may read the files; a Megatron checkpoint it cannot. The
    log says how the weights came, in how many seconds of the slowest rank.
    Errors: `SyncError` on every rank where the shards are not what the engine holds.
    """
    files, start = parts.stored.files(), time.perf_counter()
    if reader is not None and isinstance(parts.stored, HfTensors):
        by = "by the engine"
        reader.load_files(parts.stored.names_by_file(), version=0)
        sync.pull()
        parts.trainer.optimizer.reload_model_params()
    else:
        by = "each rank its own slices"
        parts.fill_from_disk()
    (seconds,) = max_over_world([time.perf_counter() - start])
    if parts.shards.layout.is_main:
        size = sum(file.stat().st_size for file in files) / 1e9
        log.info("weights: read %.3g GB of files in %.1f s, %s", size, seconds, by)
