"""Copies weights between the trainer's shards and the rollout engine, proves that both hold the
same, and loads the weights that a run starts from.

The first weight sync is a stream: every rank gets every whole HF tensor in turn, and the engine
loads them its own way. The checksums after it show that the engine's layout is as described. From
then on slices of the shards travel to the ranks that need them and are written into the engine's
own parameters, by a schedule that is made once.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from megatron_opsft.config import SyncConfig
from megatron_opsft.errors import SyncError, UserError, log
from megatron_opsft.models.architectures.template import ShardKind
from megatron_opsft.models.storage.hf_files import HfTensors
from megatron_opsft.models.weights.checksum import (
    expected_checksums,
    parameter_checksums,
)
from megatron_opsft.models.weights.rectangles import Copy
from megatron_opsft.models.weights.slicing import shard_parameter
from megatron_opsft.records import Sample, SyncResult
from megatron_opsft.rollout.engine import EngineLayout, RolloutEngine
from megatron_opsft.run.sync.export import Exporter
from megatron_opsft.run.sync.transfer import Transfer, plan_transfer
from megatron_opsft.runtime.distributed import (
    broadcast_object,
    gather_from_all,
    max_over_world,
    sum_over,
    sum_over_world,
)
from megatron_opsft.runtime.parked import Whereabouts, in_place
from megatron_opsft.trainer.model.load import TrainerParts
from megatron_opsft.trainer.model.shards import ModelShards

_DEFAULT_ALARM = {torch.float32: 1e-3, torch.bfloat16: 0.05}
# Differences so many times above the alarm come from two models, not from rounding.
_TWO_MODELS = 10


@dataclass(eq=False)
class WeightSync:
    """Copies weights to the engine (`push`) and back (`pull`). Every rank calls every method."""

    shards: ModelShards
    engine: RolloutEngine
    config: SyncConfig
    score: Callable[[Sequence[Sample]], list[tuple[float, ...]]]
    """Returns log-probs of response tokens under the trainer's weights."""
    on_device: Whereabouts = in_place
    """Of the shards while the trainer sleeps: `Offload.on_device`."""
    replays_routing: bool = False
    """`train.routing_replay`: the trainer scores with the engine's choice of experts."""
    version: int = field(default=-1, init=False)
    """The number of updates behind the weights that the engine holds."""
    _transfer: Transfer | None = field(default=None, init=False)
    """The way of all weight syncs but the first."""

    def __post_init__(self) -> None:
        shards = self.shards
        self.exporter = Exporter(
            shards.table.exported,
            partial(shards.policy_weights, self.on_device),
            shards.layout,
        )

    def push(
        self,
        version: int,
        samples: Sequence[Sample] = (),
        *,
        let_go: Callable[[], None] | None = None,
    ) -> SyncResult:
        """Copy the weights from trainer to engine, and prove it as `sync.verify` asks for.

        version: the number of updates behind the weights. samples: a few responses on which
        log-probabilities are compared, the same on every rank. let_go: called before the engine
        takes memory for its cache, when the trainer's weights are not read any more, except with
        `replays_routing`, where the trainer scores last. Errors, on every rank: `SyncError` if the
        engine holds other weights than the trainer, before anything is sampled from them;
        `UserError` if the first weight sync shows that engine and trainer compute different models
        from the same weights.
        """
        first = self._transfer is None
        self.engine.begin_update()
        if self._transfer is None:
            self.engine.copy_weights(self.exporter.stream())
        else:
            self._transfer.run(self.shards.policy_weights())
        expected = log_probs = None
        if first or self.config.verify != "off":
            expected = self._trainer_checksums()
        compares = self.config.verify == "full" and bool(samples)
        if compares and not self.replays_routing:
            log_probs = self.score(samples)
        if let_go is not None:
            let_go()
        self.engine.finish_update(version)
        self.version = version
        if expected is not None:
            self._compare(expected, f"sync of weight version {version}")
        if first:
            self._transfer = plan_transfer(
                self.shards, self.engine, self.config.bucket_mb
            )
            if self.shards.layout.is_main:
                log.info(
                    "weights go to the engine in place: at most %.1f MiB sent by a rank",
                    max(self._transfer.schedule.bytes_sent.values()) / 2**20,
                )
        mean = largest = None
        if compares:
            mean, largest = self._compare_log_probs(samples, log_probs)
            if first:
                self._check_one_model(mean)
        return SyncResult(
            version=version,
            path="stream" if first else "in_place",
            logprob_diff_mean=mean,
            logprob_diff_max=largest,
        )

    def close(self) -> None:
        """Let go of the engine's parameters, so that the engine can free them when it is closed."""
        self._transfer = None

    def pull(self) -> None:
        """Overwrite every shard with the engine's weights, bit for bit; checksums prove it.

        The caller then reloads the optimizer's main weights from the model's.
        Errors: `SyncError` for a difference.
        """
        transfer = plan_transfer(
            self.shards, self.engine, self.config.bucket_mb, pull=True
        )
        transfer.run(self.engine.weights())
        pulled = trainer_checksums(self.shards, self.engine.layout, self.shards.by_name)
        self._compare(pulled, "pull")

    def compare_checksums(self, after: str) -> None:
        """Compare the checksums of trainer and engine for every engine parameter.

        after: the operation that came before, for the message. Errors: `SyncError` on every rank
        for a difference.
        """
        self._compare(self._trainer_checksums(), after)

    def _trainer_checksums(self) -> list[int]:
        """Return `trainer_checksums` of the policy's weights."""
        weights = self.shards.policy_weights()
        return trainer_checksums(self.shards, self.engine.layout, weights)

    def _compare(self, expected: list[int], after: str) -> None:
        """Compare the engine's checksums with `expected`, the result of `trainer_checksums`."""
        names_by_rank = differing_parameters(expected, self.engine)
        bad_ranks = [rank for rank, names in enumerate(names_by_rank) if names]
        if not bad_ranks:
            return
        names = names_by_rank[bad_ranks[0]]
        shown = ", ".join(names[:3])
        if len(names) > 3:
            shown += f" and {len(names) - 3} more"
        raise SyncError(
            f"{after}: the engine of rank {bad_ranks[0]} does not hold the trainer's {shown} "
            f"(checksums differ, {len(bad_ranks)} of {len(names_by_rank)} ranks); nothing was "
            "sampled from them"
        )

    def _compare_log_probs(
        self,
        samples: Sequence[Sample],
        log_probs: Sequence[tuple[float, ...]] | None,
    ) -> tuple[float, float]:
        """Compare the log-probs of engine and trainer on these samples.

        log_probs: the trainer's; None: they are scored here, with the engine's routing.
        Returns the mean and the largest absolute difference over all scored tokens of all ranks.
        Errors: `SyncError` on every rank if it is not a number, or if the engine would have used
        keys and values cached under older weights.
        """
        scores = self.engine.score(samples)
        (stale,) = max_over_world([scores.stale_tokens])
        if stale:
            raise SyncError(
                f"sync of weight version {self.version}: the engine would have used {stale:.0f} "
                "keys and values that it had cached under the weights before; nothing was sampled"
            )
        if scores.routing:
            # Engines may round differently, but the trainer's ranks must agree.
            routing_of_main = broadcast_object(scores.routing)
            samples = [
                replace(sample, routing=routing)
                for sample, routing in zip(samples, routing_of_main, strict=True)
            ]
        if log_probs is None:
            log_probs = self.score(samples)
        differences: list[float] = []
        # Only ranks of the last pipeline stage have the trainer's log-probs.
        for of_trainer, of_engine in zip(log_probs, scores.log_probs, strict=False):
            pairs = zip(of_trainer, of_engine, strict=True)
            differences += [abs(ours - theirs) for ours, theirs in pairs]
        total, count = sum_over_world([math.fsum(differences), len(differences)])
        (largest,) = max_over_world([max(differences, default=0.0)])
        mean = total / count
        if not math.isfinite(mean):
            raise SyncError(
                f"sync of weight version {self.version}: log-probs of the engine or the trainer "
                "are NaN or infinite; nothing was sampled from these weights"
            )
        if mean > self._alarm and self.shards.layout.is_main:
            log.warning(
                "ALARM: after the sync of weight version %d the log-probs of engine and trainer "
                "differ by %.2g on average (at most %.2g); sync.logprob_alarm is %.2g",
                self.version,
                mean,
                largest,
                self._alarm,
            )
        return mean, largest

    @property
    def _alarm(self) -> float:
        """The mean difference of log-probs above which a warning is logged."""
        return self.config.logprob_alarm or _DEFAULT_ALARM[self.shards.dtype]

    def _check_one_model(self, mean: float) -> None:
        """Check that engine and trainer compute the same model from the same weights.

        mean: the mean difference of their log-probs. Errors: `UserError` if it is too large.
        """
        if mean > _TWO_MODELS * self._alarm:
            raise UserError(
                "engine and trainer hold the same weights, but their log-probs differ by "
                f"{mean:.2g} on average, more than {_TWO_MODELS} times "
                f"sync.logprob_alarm={self._alarm:g}, which rounding cannot explain: one of "
                "them ignores something in the model's config.json; take another "
                "rollout.engine, or raise sync.logprob_alarm to sample from another model"
            )


def trainer_checksums(
    shards: ModelShards, layout: EngineLayout, weights: Mapping[str, Tensor]
) -> list[int]:
    """Return what the checksum of each engine parameter of this rank must be, from the trainer's
    `weights` by Megatron name. layout: the engine's. Collective over the world.
    """
    copies = _checked_here(shards)
    own: list[int] = []
    for tp_rank in range(layout.tp_size):
        contributions = expected_checksums(
            layout.parameters_of(tp_rank), copies, weights
        )
        expected = sum_over(contributions).tolist()
        if tp_rank == layout.tp_rank:
            own = expected
    return own


def differing_parameters(
    expected: Sequence[int], engine: RolloutEngine
) -> list[list[str]]:
    """Return for each rank the parameters of its engine whose checksum is not the trainer's.

    expected: of this rank, from `trainer_checksums`. Collective over the world; the same on every
    rank.
    Errors: `SyncError` on every rank if an engine's draft model is not as it was loaded.
    """
    for fault in gather_from_all([engine.draft_fault()]):
        if fault:
            raise SyncError(f"{fault}; nothing was sampled with it")
    parameters = engine.layout.parameters_of(engine.layout.tp_rank)
    actual = parameter_checksums(parameters, engine.weights())
    checksums = zip(parameters, actual, expected, strict=True)
    differing = [p.name for p, ours, theirs in checksums if ours != theirs]
    return gather_from_all([differing])


def _checked_here(shards: ModelShards) -> Mapping[str, Sequence[Copy]]:
    """Return HF name -> the parts of that tensor whose checksum this rank contributes.

    Each part is assigned to exactly one of the ranks that hold a replica of it.
    """
    checked: dict[str, list[Copy]] = {}
    for index, (rule, _) in enumerate(shards.parameters):
        shard = shards.layout.shard(is_expert=rule.is_expert)
        if index % shard.num_copies != shard.copy_rank:
            continue  # another data-parallel rank's
        is_first_holder = rule.kind is not ShardKind.COPY or shard.tp_rank == 0
        if is_first_holder and not rule.replica:
            for copy in shard_parameter(rule, shard.tp_rank, shard.tp_size).copies:
                checked.setdefault(copy.source.tensor, []).append(copy)
    return checked


def load_first_weights(
    parts: TrainerParts, sync: WeightSync, *, by_engine: bool
) -> None:
    """Fill every shard and the optimizer's main weights. Called by every rank.

    Either every rank reads its shards from the model's files, or the engine alone reads the files,
    and the shards are filled from its parameters. The second way relies on the described layout of
    the engine, which is proved before anything is sampled or trained: the first weight sync gives
    the shards to the engine's own loader, and the checksums after it are right only if the loader
    puts every weight where the pull had read it.

    parts: the trainer, whose weights are not filled yet. by_engine: let the engine of `sync` read
    the files, unless they are a Megatron checkpoint, which it cannot read. Rank 0 logs how the
    weights came, and the seconds of the slowest rank.
    Errors: `SyncError` on every rank if the shards are not what the engine holds.
    """
    files = parts.stored.files()
    start = time.perf_counter()
    if by_engine and isinstance(parts.stored, HfTensors):
        way = "by the engine"
        # The update ends with the first push: until then the engine has no memory for its cache.
        sync.engine.begin_update()
        sync.engine.copy_files(parts.stored.names_by_file())
        sync.pull()
        parts.trainer.optimizer.reload_model_params()
    else:
        way = "each rank its own slices"
        parts.fill_from_disk()
    (seconds,) = max_over_world([time.perf_counter() - start])
    if parts.shards.layout.is_main:
        size = sum(file.stat().st_size for file in files) / 1e9
        log.info("weights: read %.3g GB of files in %.1f s, %s", size, seconds, way)
