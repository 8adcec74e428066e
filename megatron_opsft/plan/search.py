"""The fastest layout of a run that fits its devices: every one is planned; pure."""

import json
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
_ALWAYS_SHOWN = ("parallel.tp", "parallel.pp", "train.recompute", "rollout.tp")

Change = dict[str, dict[str, Any]]
"""Section -> key -> value."""


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
    refused = UserError("no layout was tried")
    for change in _layouts(job):
        try:
            estimate = _estimate(job, change, workload, num_steps)
        except UserError as error:
            refused = error
            continue
        if (fraction := _fraction_that_fits(estimate)) is not None:
            change["rollout"]["gpu_memory_fraction"] = fraction
            estimate = _estimate(job, change, workload, num_steps)
        found.append(FoundLayout(estimate=estimate, overrides=_overrides(job.config, change)))
    if not found:
        check_job(job)  # what is wrong with the file itself
        raise refused
    found.sort(key=_rank_of)
    limit = (1 + _EQUALLY_FAST) * found[0].estimate.step.total
    near = [f for f in found if f.estimate.is_safe and f.estimate.step.total <= limit]
    near.sort(key=lambda one: -round(one.estimate.worst.margin / 1e9))
    return near + found[len(near) :]


def _rank_of(found: FoundLayout) -> tuple[bool, float, int]:
    """Fitting ones first, the fastest; among equally fast ones the simplest."""
    estimate = found.estimate
    badness = estimate.step.total if estimate.is_safe else -estimate.worst.margin
    return not estimate.is_safe, round(badness, 3), len(found.overrides)


def _estimate(job: TrainingJob, change: Change, workload: Workload, num_steps: int) -> RunEstimate:
    """Errors: `UserError` where the trainer refuses the change."""
    sections = {
        section: getattr(job.config, section).model_copy(update=values)
        for section, values in change.items()
    }
    changed = replace(job, config=job.config.model_copy(update=sections))
    check_job(changed)
    return estimate_run(changed, workload, num_steps)


def _layouts(job: TrainingJob) -> Iterator[Change]:
    """Those that may be accepted."""
    layers, world_size = job.shape.num_layers, job.world_size
    inside_node = [n for n in range(1, job.hardware.gpus_per_node + 1) if world_size % n == 0]
    for tp, pp, cp, ep, recompute, rollout_tp in product(
        inside_node,
        [n for n in range(1, min(layers, _MAX_PIPELINE) + 1) if layers % n == 0],
        _context_sizes(job),
        _expert_sizes(job),
        ("none", "selective", "full"),
        inside_node if job.engine.tensor_parallel else [1],
    ):
        yield {
            "parallel": {
                "tp": tp,
                "pp": pp,
                "cp": cp,
                "ep": ep,
                "etp": 1 if ep > 1 and tp > 1 else None,
                "vpp": None,
                "sequence_parallel": tp > 1,
            },
            "train": {"recompute": recompute},
            "rollout": {"tp": rollout_tp},
        }


def _context_sizes(job: TrainingJob) -> list[int]:
    """1, 2, 4, ... as long as a rank's part of the longest sequence is beyond the budget."""
    sizes = [1]
    budget = job.config.train.max_tokens_per_microbatch
    while sizes[-1] * budget < job.longest_tokens and sizes[-1] < job.hardware.gpus_per_node:
        sizes.append(2 * sizes[-1])
    return sizes


def _expert_sizes(job: TrainingJob) -> list[int]:
    """1, 2, 4, ... inside a node; 1 without experts."""
    most = job.hardware.gpus_per_node if job.shape.moe else 1
    return [2**n for n in range(most.bit_length())]


def _overrides(config: Config, change: Change) -> tuple[str, ...]:
    """What differs from the file, and always the layout."""
    overrides = []
    for section, values in change.items():
        for name, value in values.items():
            key, before = f"{section}.{name}", getattr(getattr(config, section), name)
            if value != before or key in _ALWAYS_SHOWN:
                overrides.append(f"{key}={json.dumps(value)}".replace('"', ""))
    return tuple(overrides)


def _fraction_that_fits(estimate: RunEstimate) -> float | None:
    """Share of a device's memory, for vLLM; None where that is not what stands in the way."""
    job = estimate.job
    rollout = job.config.rollout
    if not (job.hardware.is_cuda and job.engine.refills) or rollout.kv_cache_bytes is not None:
        return None
    room = (1 - SAFE_SHARE) * estimate.worst.limit
    over = max(rank.phases["rollout"] for rank in estimate.memory) - room
    fraction = floor(100 * (rollout.gpu_memory_fraction - over / estimate.worst.limit)) / 100
    return fraction if over > 0 and fraction > 0 else None


def found_as_json(found: list[FoundLayout]) -> dict[str, Any]:
    """One JSON object of the layouts, best first."""
    best = found[0].estimate
    return {
        "fits": best.is_safe,
        "best": run_as_json(best) if best.is_safe else None,
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
