"""The fastest layout of a run that fits its devices: every one is planned; pure."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import floor
from typing import Any

from megatron_opsft.config import Config
from megatron_opsft.errors import UserError
from megatron_opsft.plan.checks import check_job
from megatron_opsft.plan.estimate import SAFE_SHARE, RunEstimate, estimate_run, run_as_json
from megatron_opsft.plan.job import TrainingJob
from megatron_opsft.plan.workload import Workload

_MAX_PIPELINE = 32
_EQUALLY_FAST = 0.01  # steps that differ by less differ by less than a plan knows
_RECOMPUTE = ("none", "selective", "full")

Change = dict[str, Any]
"""section.key -> value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLayout:
    """One layout and what makes it of the given configuration."""

    estimate: RunEstimate
    overrides: tuple[str, ...]


def search_layouts(job: TrainingJob, workload: Workload, num_steps: int) -> list[FoundLayout]:
    """All layouts that the trainer accepts: those that fit by seconds of a step, then the others by
    what they lack. Of those within `_EQUALLY_FAST` of the fastest the one with the most memory to
    spare comes first. What it proposes leaves `SAFE_SHARE` of the memory free.

    Tried are parallel.tp within a node (with sequence parallelism) x parallel.pp x parallel.cp
    x train.recompute x rollout.tp, and of a mixture of experts parallel.ep within a node, with
    whole experts (parallel.etp=1). More context parallelism is tried where half as much leaves a
    rank more of the longest sequence than train.max_tokens_per_microbatch. Where a rollout does not
    fit, rollout.gpu_memory_fraction is lowered until it does. Errors: `UserError` where no layout
    is accepted at all, with the reason.
    """
    found = []
    refused: UserError | None = None
    for changes in _layouts(job):
        try:
            estimate = _estimate(job, changes, workload, num_steps)
        except UserError as error:
            refused = error
            continue
        fraction = _fraction_that_fits(estimate)
        if fraction is not None:
            changes = {**changes, "rollout.gpu_memory_fraction": fraction}
            estimate = _estimate(job, changes, workload, num_steps)
        found.append(FoundLayout(estimate=estimate, overrides=_overrides(job.config, changes)))
    if not found:
        check_job(job)  # what is wrong with the file itself
        raise refused or UserError(f"no layout of {job.world_size} ranks is there to be tried")
    ranked = sorted(found, key=_rank_of)
    limit = (1 + _EQUALLY_FAST) * ranked[0].estimate.step.total
    near = [f for f in ranked if f.estimate.is_safe and f.estimate.step.total <= limit]
    near.sort(key=lambda one: -round(one.estimate.worst.margin / 1e9))
    return near + [one for one in ranked if one not in near]


def _estimate(job: TrainingJob, changes: Change, workload: Workload, num_steps: int) -> RunEstimate:
    """Errors: `UserError` where the trainer refuses the change."""
    changed = replace(job, config=_changed(job.config, changes))
    check_job(changed)
    return estimate_run(changed, workload, num_steps)


def _rank_of(found: FoundLayout) -> tuple[bool, float, int]:
    """Fitting ones first, the fastest; among equally fast ones the simplest."""
    estimate = found.estimate
    badness = estimate.step.total if estimate.is_safe else -estimate.worst.margin
    return not estimate.is_safe, round(badness, 3), len(found.overrides)


def _layouts(job: TrainingJob) -> Iterator[Change]:
    shape, world_size = job.shape, job.world_size
    inside_node = [n for n in range(1, job.hardware.gpus_per_node + 1) if world_size % n == 0]
    engine_sizes = inside_node if job.engine.tensor_parallel else [1]
    offload = job.config.train.offload_layers
    for tp in inside_node:
        for pp in range(1, min(shape.num_layers, _MAX_PIPELINE) + 1):
            if shape.num_layers % pp or (offload and pp > 1):
                continue
            cps = [c for c in _context_sizes(job) if world_size % (tp * pp * c) == 0]
            recomputes = _RECOMPUTE[: 1 if offload else None]
            eps = [n for n in _expert_sizes(job) if world_size % (n * pp) == 0]
            for cp, ep, recompute, rollout_tp in product(cps, eps, recomputes, engine_sizes):
                yield {
                    "parallel.tp": tp,
                    "parallel.pp": pp,
                    "parallel.cp": cp,
                    "parallel.ep": ep,
                    "parallel.etp": 1 if ep > 1 and tp > 1 else None,
                    "parallel.vpp": None,
                    "parallel.sequence_parallel": tp > 1,
                    "train.recompute": recompute,
                    "rollout.tp": rollout_tp,
                }


def _context_sizes(job: TrainingJob) -> list[int]:
    """1, 2, 4, ... as long as a rank's part of the longest sequence is beyond the budget."""
    sizes = [1]
    budget = job.config.train.max_tokens_per_microbatch
    while sizes[-1] * budget < job.longest_tokens and sizes[-1] < job.hardware.gpus_per_node:
        sizes.append(2 * sizes[-1])
    return sizes


def _expert_sizes(job: TrainingJob) -> list[int]:
    """1, 2, 4, ... that share out the experts evenly, inside a node."""
    sizes = [2**n for n in range(job.hardware.gpus_per_node.bit_length())]
    return [
        n for n in sizes if job.shape.moe is not None and job.shape.moe.num_experts % n == 0
    ] or [1]


def _changed(config: Config, changes: Change) -> Config:
    sections: dict[str, Change] = {}
    for key, value in changes.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return config.model_copy(
        update={
            section: getattr(config, section).model_copy(update=values)
            for section, values in sections.items()
        }
    )


def _overrides(config: Config, changes: Change) -> tuple[str, ...]:
    """What differs from the file, and always the layout."""
    overrides = []
    for key, value in changes.items():
        section, name = key.split(".")
        shown = (
            "null" if value is None else str(value).lower() if isinstance(value, bool) else value
        )
        always = key in ("parallel.tp", "parallel.pp", "train.recompute", "rollout.tp")
        if always or getattr(getattr(config, section), name) != value:
            overrides.append(f"{key}={shown}")
    return tuple(overrides)


def _fraction_that_fits(estimate: RunEstimate) -> float | None:
    """Share of a device's memory, for vLLM; None where that is not what stands in the way."""
    job = estimate.job
    if not job.hardware.is_cuda or not job.engine.refills:
        return None
    if job.config.rollout.kv_cache_bytes is not None:
        return None
    room = (1 - SAFE_SHARE) * estimate.worst.limit
    over = max(rank.phases["rollout"] for rank in estimate.memory) - room
    if over <= 0:
        return None
    fraction = job.config.rollout.gpu_memory_fraction - over / estimate.worst.limit
    fraction = floor(100 * fraction) / 100
    return fraction if fraction > 0 else None


def found_as_json(found: list[FoundLayout]) -> dict[str, Any]:
    """One JSON object of the layouts, best first."""
    best = found[0].estimate if found and found[0].estimate.is_safe else None
    return {
        "fits": best is not None,
        "best": run_as_json(best) if best is not None else None,
        "layouts": [
            {
                "overrides": list(one.overrides),
                "fits": one.estimate.is_safe,
                "margin_bytes": one.estimate.worst.margin,
                "step_seconds": one.estimate.step.total,
                "price": one.estimate.price,
            }
            for one in found
        ],
    }
