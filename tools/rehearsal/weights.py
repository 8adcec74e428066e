"""What is rehearsed of weights: the schedule of a push, and the plan of a checkpoint."""

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from rehearsal.fake_rank import build_buffers, fake_rank
from rehearsal.fake_world import FakeWorld
from rehearsal.parts import Measure
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megatron_opsft.model.checkpoint_plan import OwnPlan
from megatron_opsft.model.checkpoint_share import MOMENTS, describe_models, own_share
from megatron_opsft.model.shards import ModelShards
from megatron_opsft.plan.job import TrainingJob
from megatron_opsft.rollout.engine import EngineLayout, EngineWeights
from megatron_opsft.runtime import cpu_compat
from megatron_opsft.runtime.device import Device
from megatron_opsft.runtime.distributed import Layout, gather_on_first
from megatron_opsft.runtime.exchange import digest_of, to_bytes
from megatron_opsft.storage.dist_metadata import METADATA_NAME
from megatron_opsft.storage.metadata_parts import MetadataPart, metadata_part, write_metadata
from megatron_opsft.sync.transfer import engine_placements, trainer_placements
from megatron_opsft.weights.rectangles import hf_columns
from megatron_opsft.weights.rules import WeightTable
from megatron_opsft.weights.schedule import make_schedule
from megatron_opsft.weights.vllm_layout import vllm_parameters


class PushParts:
    """Once a run: who holds what, and which rectangle goes where."""

    def __init__(self, job: TrainingJob, layout: Layout, world: FakeWorld) -> None:
        self._job, self._layout, self._world = job, layout, world
        self._table = WeightTable(job.shape, "local", job.parallel.tp)

    def run(self, measure: Measure) -> None:
        job, layout = self._job, self._layout
        rules = self._rules(layout.pp_rank, layout.ep_rank)
        nothing = torch.empty(0, device="meta")
        shards = ModelShards(
            table=self._table, layout=layout, parameters=tuple((rule, nothing) for rule in rules)
        )
        engine = EngineLayout(
            tp_size=job.engine_tp,
            parameters_of=lambda rank: vllm_parameters(self._table, rank, job.engine_tp),
            hf_columns=hf_columns(self._table.hf_shapes()),
        )
        own = EngineWeights(tp_rank=layout.rank % job.engine_tp, tensors={})
        names = {
            (stage, ep_rank): tuple(rule.mcore_name for rule in self._rules(stage, ep_rank))
            for stage in range(job.parallel.pp)
            for ep_rank in range(job.parallel.ep)
        }
        per_stage, etp = job.world_size // job.parallel.pp, job.parallel.expert_tp
        trainer = [
            (
                (rank % job.parallel.tp, rank % etp),
                names[rank // per_stage, rank % per_stage // etp % job.parallel.ep],
            )
            for rank in range(job.world_size)
        ]
        numbers = [rank % job.engine_tp for rank in range(job.world_size)]

        said = _said(trainer), _said(numbers)

        def who() -> Any:
            self._world.will_gather(*said[0])
            sources = trainer_placements(shards)
            self._world.will_gather(*said[1])
            return sources, engine_placements(engine, own)

        sources, targets = measure("who holds what", who)
        self._world.will_gather()

        def schedule() -> Any:
            made = make_schedule(
                sources,
                targets,
                rank=layout.rank,
                itemsize=job.dtype_bytes,
                bucket_bytes=job.config.sync.bucket_mb * 2**20,
            )
            return made.program(layout.rank)

        measure("schedule of a push", schedule)

    def _rules(self, stage: int, ep_rank: int) -> Any:
        each = self._table.num_experts // self._job.parallel.ep
        num_layers = self._job.shape.num_layers // self._job.parallel.pp
        return self._table.stage_rules(
            range(stage * num_layers, (stage + 1) * num_layers),
            has_embedding=stage == 0,
            has_output=stage == self._job.parallel.pp - 1,
            experts=range(ep_rank * each, (ep_rank + 1) * each),
        )


def _said(values: Sequence[Hashable]) -> tuple[list[Tensor], list[Tensor]]:
    """What the ranks say in `ranks_by_value`: all a digest, the first with a value also that."""
    digests = {value: digest_of(value) for value in set(values)}
    first_with = {value: rank for rank, value in reversed([*enumerate(values)])}
    said = [
        to_bytes([value] if first_with[value] == rank else []) for rank, value in enumerate(values)
    ]
    return [digests[value] for value in values], said


class CheckpointParts:
    """Once for every save: this rank's share and plan, and what rank 0 makes of all of them."""

    def __init__(
        self,
        job: TrainingJob,
        layout: Layout,
        world: FakeWorld,
        directory: Path,
        parts: Sequence[Tensor],
    ) -> None:
        """parts: what a rank of each stage sends to rank 0 (`stage_parts`)."""
        self._job, self._layout, self._world = job, layout, world
        self._directory, self._parts = directory, parts

    def run(self, measure: Measure) -> None:
        mine = measure("plan of a checkpoint", _planner(self._job, self._directory))
        if not self._layout.is_main:
            return
        per_stage = self._job.world_size // self._job.parallel.pp
        parts = self._parts
        self._world.routed = {
            rank: {0: parts[rank // per_stage]} for rank in range(self._job.world_size)
        }

        def join() -> None:
            whole = MetadataPart()
            for part in gather_on_first(mine):
                whole.add(part)
            whole.missing()
            write_metadata(whole, self._directory / METADATA_NAME)

        measure("metadata of a checkpoint", join)
        self._world.routed = {}


def stage_parts(job: TrainingJob, directory: Path) -> list[Tensor]:
    """The metadata part of the first rank of each stage, as it is sent. Tensor- and data-parallel
    ranks have as much to tell, though of other places.
    """
    per_stage = job.world_size // job.parallel.pp
    parts = []
    for stage in range(job.parallel.pp):
        with fake_rank(job, stage * per_stage):
            parts.append(to_bytes(_planner(job, directory)()))
    return parts


def _planner(job: TrainingJob, directory: Path) -> Callable[[], MetadataPart]:
    """How the rank of the moment plans, and describes what it writes, of tensors without memory."""
    with cpu_compat.without_memory() as meta:
        models, *kinds = build_buffers(job, Device(torch_device=meta, backend="fake"))
        optimizer = SimpleNamespace(chained_optimizers=[_shards_of(kind) for kind in kinds if kind])

    def plan() -> MetadataPart:
        share = own_share(describe_models(models), optimizer, is_loading=False)
        strategy = OwnPlan()
        strategy.async_save({"share": share}, directory)
        return metadata_part(strategy.items, [_written(item) for item in strategy.items])

    return plan


def _written(item: WriteItem) -> WriteResult:
    return WriteResult(item.index, 1 << 24, _StorageInfo("__1000_0.distcp", 1 << 24, 1 << 24))


def _shards_of(buffers: list[Any]) -> Any:
    """The part of the optimizer that these buffers have, as a checkpoint sees it: Megatron's own
    ranges, and tensors without memory. Megatron builds no optimizer of such.
    """
    ranges = [DistributedOptimizer._build_gbuf_range_map(buffer) for buffer in buffers]
    owned = {
        weight: torch.empty(found["param"].size, device="meta")
        for of_buffer in ranges
        for buckets in of_buffer.values()
        for bucket in buckets
        for weight, found in bucket["param_map"].items()
    }
    return SimpleNamespace(
        gbuf_ranges=ranges,
        model_param_group_index_map={weight: (0, i) for i, weight in enumerate(owned)},
        optimizer=SimpleNamespace(
            param_groups=[{"params": list(owned.values())}],
            state={main: dict.fromkeys(MOMENTS, main) for main in owned.values()},
        ),
    )
