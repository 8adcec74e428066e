"""The fastest layout of a run that fits its devices: every one is planned; pure."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import floor
from typing import Any

from megatron_opsft.commands.plan.estimate import SAFE_SHARE, Plan
from megatron_opsft.commands.plan.job import Job, check_job
from megatron_opsft.errors import UserError

_MAX_PIPELINE = 32
_EQUALLY_FAST = 0.05  # steps that differ by less differ by less than a plan knows
_RECOMPUTE = ("none", "selective", "full")
_ALWAYS_SHOWN = {
    ("parallel", "tp"),
    ("parallel", "pp"),
    ("train", "recompute"),
    ("rollout", "tp"),
}

Change = dict[str, dict[str, Any]]
"""Section -> key -> value."""


def search_layouts(job: Job, num_steps: int) -> list[Plan]:
    """All layouts that the trainer accepts, best first (`_rank_of`). What it proposes leaves
    `SAFE_SHARE` of the memory free.

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
            plan = _planned(job, change, num_steps)
        except UserError as error:
            refused = error
            continue
        if (fraction := _fraction_that_fits(plan)) is not None:
            change["rollout"]["gpu_memory_fraction"] = fraction
            plan = _planned(job, change, num_steps)
        found.append(plan)
    if not found:
        check_job(job)  # what is wrong with the file itself
        raise refused
    fastest = min((plan.step["total"] for plan in found if plan.is_safe), default=0.0)
    return sorted(found, key=lambda plan: _rank_of(plan, (1 + _EQUALLY_FAST) * fastest))


def _rank_of(plan: Plan, limit: float) -> tuple[float, ...]:
    """Those that fit by seconds of a step, then the others by what they lack. Up to `limit` seconds
    layouts are equally fast: those with twice `SAFE_SHARE` of the memory free come first, then the
    simplest, then by what they leave free in steps of `SAFE_SHARE`. Simple is what takes few ways
    of cutting the model and of saving memory; full recomputation is two of them.
    """
    seconds = round(plan.step["total"], 3)
    if not plan.is_safe:
        return 2, round(-plan.worst.margin, 3), len(plan.overrides)
    if plan.step["total"] > limit:
        return 1, seconds, len(plan.overrides)
    parallel, config = plan.job.parallel, plan.job.config
    sizes = (parallel.tp, parallel.pp, parallel.cp, parallel.ep, config.rollout.tp)
    recomputed = _RECOMPUTE.index(config.train.recompute)
    lowered = any(
        key.startswith("rollout.gpu_memory_fraction") for key in plan.overrides
    )
    measures = sum(size > 1 for size in sizes) + recomputed + lowered
    free = int(plan.worst.margin / (SAFE_SHARE * plan.worst.limit))
    return 0, free < 2, measures, -free, seconds, len(plan.overrides)


def _planned(job: Job, change: Change, num_steps: int) -> Plan:
    """Its overrides are what differs from the file, and always the layout. Errors: `UserError`
    where the trainer refuses the change.
    """
    update = {n: getattr(job.config, n).model_copy(update=v) for n, v in change.items()}
    changed = replace(job, config=job.config.model_copy(update=update))
    check_job(changed)
    overrides = tuple(
        f"{section}.{name}={json.dumps(value)}".replace('"', "")
        for section, keys in change.items()
        for name, value in keys.items()
        if (section, name) in _ALWAYS_SHOWN
        or value != getattr(getattr(job.config, section), name)
    )
    return Plan(job=changed, num_steps=num_steps, overrides=overrides)


def _layouts(job: Job) -> Iterator[Change]:
    """Those that may be accepted."""
    layers, per_node = job.shape.num_layers, job.hardware.gpus_per_node
    inside_node = [n for n in range(1, per_node + 1) if job.world_size % n == 0]
    # 1, 2, 4, ... as long as a rank's part of the longest sequence is beyond the budget.
    context_sizes, budget = [1], job.config.train.max_tokens_per_microbatch
    while (
        context_sizes[-1] * budget < job.longest_tokens and context_sizes[-1] < per_node
    ):
        context_sizes.append(2 * context_sizes[-1])
    most_experts = per_node if job.shape.moe else 1
    for tp, pp, cp, ep, recompute, rollout_tp in product(
        inside_node,
        [n for n in range(1, min(layers, _MAX_PIPELINE) + 1) if layers % n == 0],
        context_sizes,
        [2**n for n in range(most_experts.bit_length())],
        _RECOMPUTE,
        inside_node if job.engine.tensor_parallel else [1],
    ):
        parallel = {"tp": tp, "pp": pp, "cp": cp, "ep": ep}
        parallel |= {"etp": 1 if ep > 1 and tp > 1 else None, "vpp": None}
        parallel["sequence_parallel"] = tp > 1
        yield {
            "parallel": parallel,
            "train": {"recompute": recompute},
            "rollout": {"tp": rollout_tp},
        }


def _fraction_that_fits(plan: Plan) -> float | None:
    """Share of a device's memory, for vLLM; None where that is not what stands in the way."""
    job, rollout, limit = plan.job, plan.job.config.rollout, plan.worst.limit
    if (
        not (job.hardware.is_cuda and job.engine.refills)
        or rollout.kv_cache_bytes is not None
    ):
        return None
    over = (
        max(rank.phases["rollout"] for rank in plan.memory) - (1 - SAFE_SHARE) * limit
    )
    fraction = floor(100 * (rollout.gpu_memory_fraction - over / limit)) / 100
    return fraction if over > 0 and fraction > 0 else None
