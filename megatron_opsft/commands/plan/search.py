"""The fastest layout of a run that fits its devices, found by planning every layout; pure."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import floor
from typing import Any

from megatron_opsft.commands.plan.estimate import SAFE_SHARE, Plan
from megatron_opsft.commands.plan.job import PlannedRun, check_planned_run
from megatron_opsft.config.training import OFFLOAD_LEVELS
from megatron_opsft.errors import UserError

_MAX_PIPELINE = 32
# A plan is not accurate enough for smaller differences between steps.
_EQUALLY_FAST = 0.05
_RECOMPUTE = ("none", "selective", "full")
_ALWAYS_SHOWN = {"parallel.tp", "parallel.pp", "train.recompute", "rollout.tp"}
# What is tried where no layout fits: times as many nodes, and adapters of this rank.
_TIMES_NODES = (2, 4, 8, 16)
_LORA_RANK = 32

Change = dict[str, dict[str, Any]]
"""Section -> key -> value."""


def search_layouts(run: PlannedRun, num_steps: int) -> list[Plan]:
    """Plan all layouts that the trainer accepts; best first (see `_rank_of`).

    Tried are parallel.tp within a node (with sequence parallelism) x parallel.pp x parallel.cp
    x train.recompute x rollout.tp, and for a mixture of experts parallel.ep within a node, with
    whole experts (parallel.etp=1). On GPUs a layout gets the least train.offload with which it
    fits. parallel.cp is doubled only as long as a rank's part of the longest sequence has more than
    train.max_tokens_per_microbatch tokens. If a rollout would leave less than `SAFE_SHARE` of the
    memory free, rollout.gpu_memory_fraction is lowered until it fits.
    Errors: `UserError` with the reason if no layout is accepted at all.
    """
    plans = []
    refusal = UserError("no layout was tried")
    for change in _layouts(run):
        try:
            plans.append(_plan_layout(run, change, num_steps))
        except UserError as error:
            refusal = error
    if not plans:
        check_planned_run(run)  # raises for a mistake in the file itself
        raise refusal
    fastest = min((plan.step["total"] for plan in plans if plan.is_safe), default=0.0)
    limit = (1 + _EQUALLY_FAST) * fastest
    return sorted(plans, key=lambda plan: _rank_of(plan, limit))


def what_would_fit(run: PlannedRun, num_steps: int) -> list[str]:
    """Name changes of a run that no layout makes safe, each of which is enough by itself with a
    layout that a search finds: shorter micro-batches, more nodes, adapters. Empty if none is.
    """
    found = []
    train, lora = run.train, run.config.lora
    shortest = run.longest_tokens
    if shortest < train.max_tokens_per_microbatch:
        changed = train.model_copy(update={"max_tokens_per_microbatch": shortest})
        if _has_safe_layout(run.with_sections(train=changed), num_steps):
            found.append(f"train.max_tokens_per_microbatch={shortest}")
    for times in _TIMES_NODES:
        larger = replace(run, world_size=times * run.world_size)
        if _has_safe_layout(larger, num_steps):
            found.append(f"--nodes {larger.world_size // run.hardware.gpus_per_node}")
            break
    if not lora.rank:
        changed_lora = lora.model_copy(update={"rank": _LORA_RANK})
        if _has_safe_layout(run.with_sections(lora=changed_lora), num_steps):
            found.append(f"lora.rank={_LORA_RANK}")
    return found


def _has_safe_layout(run: PlannedRun, num_steps: int) -> bool:
    """True if a search finds a layout that is safe; False also where the trainer refuses all."""
    with suppress(UserError):
        return search_layouts(run, num_steps)[0].is_safe
    return False


def _plan_layout(run: PlannedRun, change: Change, num_steps: int) -> Plan:
    """Plan a layout with the least `train.offload` that is safe; if none is, with the least that
    fits; if none does, with that which lacks the least memory. Errors: `UserError` if the trainer
    refuses the layout.
    """
    levels = OFFLOAD_LEVELS if run.hardware.is_cuda else (run.train.offload_level,)
    plans: list[Plan] = []
    for level in levels:  # from the least to the most that the trainer gives up
        train = {**change["train"], "offload": level}
        try:
            plan = _plan_with_room(run, {**change, "train": train}, num_steps)
        except UserError:
            if not plans:
                raise  # the layout itself is refused
            break  # this level is
        if plan.is_safe:
            return plan
        plans.append(plan)
        if any(rank.phases["train"] > rank.limit for rank in plan.memory):
            break  # what the trainer gives up while others work is back when it trains
    fitting = [plan for plan in plans if not plan.problems]
    if fitting:
        return fitting[0]
    return max(plans, key=lambda plan: round(plan.worst.margin, 3))


def _plan_with_room(run: PlannedRun, change: Change, num_steps: int) -> Plan:
    """Plan a change, with a smaller share of the memory for vLLM if that is what it takes."""
    plan = _plan_change(run, change, num_steps)
    fraction = _fraction_that_fits(plan)
    if fraction is None:
        return plan
    rollout = {**change["rollout"], "gpu_memory_fraction": fraction}
    return _plan_change(run, {**change, "rollout": rollout}, num_steps)


def _rank_of(plan: Plan, limit: float) -> tuple[float, ...]:
    """Return the sort key of a plan. limit: seconds up to which steps are equally fast.

    Safe plans come first, by seconds of a step; then the others, by the memory that they lack.
    Among the equally fast ones those with twice `SAFE_SHARE` of the memory free come first, then
    the simpler ones, then those with more memory free, in steps of `SAFE_SHARE`. A layout is
    simpler the fewer kinds of parallelism and memory saving it uses; full recomputation counts
    twice.
    """
    seconds = round(plan.step["total"], 3)
    num_overrides = len(plan.overrides)
    if not plan.is_safe:
        return 2, round(-plan.worst.margin, 3), num_overrides
    if plan.step["total"] > limit:
        return 1, seconds, num_overrides
    parallel, rollout = plan.run.parallel, plan.run.rollout
    sizes = (parallel.tp, parallel.pp, parallel.cp, parallel.ep, rollout.tp)
    num_measures = sum(size > 1 for size in sizes)
    num_measures += _RECOMPUTE.index(plan.run.train.recompute)
    num_measures += OFFLOAD_LEVELS.index(plan.run.train.offload_level)
    num_measures += sum("gpu_memory_fraction" in text for text in plan.overrides)
    free = int(plan.worst.margin / (SAFE_SHARE * plan.worst.limit))
    return 0, free < 2, num_measures, -free, seconds, num_overrides


def _plan_change(run: PlannedRun, change: Change, num_steps: int) -> Plan:
    """Plan the run with a change; the plan's overrides are what differs, and always the layout.

    Errors: `UserError` if the trainer refuses the change.
    """
    sections = {}
    overrides = []
    for name, values in change.items():
        section = getattr(run.config, name)
        sections[name] = section.model_copy(update=values)
        for key, value in values.items():
            full_key = f"{name}.{key}"
            if full_key in _ALWAYS_SHOWN or value != getattr(section, key):
                text = json.dumps(value).replace('"', "")
                overrides.append(f"{full_key}={text}")
    changed = replace(run, config=run.config.model_copy(update=sections))
    check_planned_run(changed)
    return Plan(run=changed, num_steps=num_steps, overrides=tuple(overrides))


def _layouts(run: PlannedRun) -> Iterator[Change]:
    """Yield the layouts that the trainer may accept."""
    gpus_per_node = run.hardware.gpus_per_node
    inside_node = _divisors(run.world_size, gpus_per_node)
    expert_sizes = [1]
    if run.shape.moe:
        expert_sizes = [2**power for power in range(gpus_per_node.bit_length())]
    for tp, pp, cp, ep, recompute, rollout_tp in product(
        inside_node,
        _divisors(run.shape.num_layers, _MAX_PIPELINE),
        _context_sizes(run),
        expert_sizes,
        _RECOMPUTE,
        inside_node if run.engine.tensor_parallel else [1],
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


def _divisors(number: int, largest: int) -> list[int]:
    return [size for size in range(1, largest + 1) if number % size == 0]


def _context_sizes(run: PlannedRun) -> list[int]:
    """Return 1, 2, 4, ... until a rank's part of the longest sequence is within the budget; only 1
    for a model with gated delta nets, which cannot be cut so.
    """
    sizes, budget = [1], run.train.max_tokens_per_microbatch
    if run.shape.delta:
        return sizes
    gpus_per_node = run.hardware.gpus_per_node
    while sizes[-1] * budget < run.longest_tokens and sizes[-1] < gpus_per_node:
        sizes.append(2 * sizes[-1])
    return sizes


def _fraction_that_fits(plan: Plan) -> float | None:
    """Return the share of a device's memory with which vLLM's rollout fits.

    None if it fits already, or if a smaller share cannot help.
    """
    run, rollout = plan.run, plan.run.rollout
    is_vllm_on_gpu = run.hardware.is_cuda and run.engine.refills
    if not is_vllm_on_gpu or rollout.kv_cache_bytes is not None:
        return None
    limit = plan.worst.limit
    needed = max(rank.phases["rollout"] for rank in plan.memory)
    excess = needed - (1 - SAFE_SHARE) * limit
    fraction = floor(100 * (rollout.gpu_memory_fraction - excess / limit)) / 100
    return fraction if excess > 0 and fraction > 0 else None
