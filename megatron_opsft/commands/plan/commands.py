"""`megatron-opsft plan`: the commands, as users call them, and plans as people read them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field
from tabulate import tabulate

from megatron_opsft.commands.command_line import Command, RunCommand, group
from megatron_opsft.commands.plan.assumptions import PAPER_ACCEPTANCE, load_hardware
from megatron_opsft.errors import ANSWER_IS_NO, UserError
from megatron_opsft.runtime.console import say

if TYPE_CHECKING:
    from megatron_opsft.commands.plan.estimate import Plan

_NUM_SHOWN = 5  # layouts of a search


class _OnDevices(Command):
    """The options about devices that both commands share."""

    gpu: str = "h100"
    """Device: h100, h200, a100, b200, cpu, or one of --hardware."""
    gpus_per_node: int | None = Field(None, ge=1)
    """Devices, and ranks, of a node; by default 8, on CPUs as many ranks as the layout needs."""
    hardware: Path | None = None
    """Figures of devices, such as `plan calibrate` prints."""


class PlanRun(_OnDevices, RunCommand):
    """Check a run end to end without a device, and say whether it fits and what it costs.

    Needs nothing of the model but config.json. Exit code 0: it fits; 4: it does not; 2: bad input.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "plan examples/configs/r1_distill_7b_paper.yaml --nodes 2",
        "plan CONFIG --nodes 1,8,64",
        "plan CONFIG rollout.engine=vllm --gpu a100 --search",
    )
    nodes: str = "1"
    """Number of nodes; 1,8,64 gives a row for each."""
    mean_tokens: float | None = Field(None, ge=1)
    """Mean response length without the limit; by default the paper's last, 2186, or 62 % of a limit
    below the paper's.
    """
    acceptance: float = Field(PAPER_ACCEPTANCE, ge=0, le=1)
    """Share of correct, finished responses."""
    search: bool = False
    """Look for the fastest layout that fits."""
    as_json: bool = Field(False, alias="json")
    """Print one JSON object."""

    def run(self) -> int:
        """Print what the run takes; whether it fits as exit code."""
        counts = self._node_counts()
        config = self.load()
        if (num_steps := config.run.steps) < 1:
            raise UserError("run.steps=0 costs nothing; set run.steps above 0")
        size, note = self.gpus_per_node or 8, ""
        if self.gpu == "cpu" and self.gpus_per_node is None:
            parallel = config.parallel
            experts = (
                parallel.expert_tp * parallel.ep * parallel.pp if parallel.ep > 1 else 1
            )
            # The fewest ranks that can hold the layout and its engine.
            size = lcm(parallel.replica_size, experts, config.rollout.tp)
            note = f"ranks of a node: {size}, as the layout needs; others with --gpus-per-node\n\n"
        device = load_hardware(self.gpu, self.hardware, gpus_per_node=size)
        from megatron_opsft.commands.plan import estimate, job, search

        responses = {"mean_tokens": self.mean_tokens, "acceptance": self.acceptance}
        first = job.make_job(config, device, counts[0] * size, **responses)
        if self.search:
            plans = search.search_layouts(first, num_steps)
            fits, text = plans[0].is_safe, show_found(plans)
            layouts = [
                {"overrides": p.overrides, **p.as_json()} for p in plans[:_NUM_SHOWN]
            ]
            made: dict[str, Any] = {"fits": fits, "layouts": layouts}
        else:
            jobs = [replace(first, world_size=count * size) for count in counts]
            for one in jobs:
                job.check_job(one)
            plans = [estimate.Plan(job=one, num_steps=num_steps) for one in jobs]
            fits = not any(plan.problems for plan in plans)
            made, text = plans[0].as_json(), show_plan(plans[0])
            if len(plans) > 1:
                made, text = (
                    {"runs": [plan.as_json() for plan in plans]},
                    show_nodes(plans),
                )
        say(json.dumps(made) if self.as_json else note + text)
        return 0 if fits else ANSWER_IS_NO

    def _node_counts(self) -> list[int]:
        """Errors: `UserError`, also for several where a search takes one."""
        parts = self.nodes.split(",")
        if not all(part.isdecimal() and int(part) for part in parts):
            raise UserError(
                f"--nodes={self.nodes} must be a number of nodes, or several: 1,8,64"
            )
        if self.search and len(parts) > 1:
            raise UserError(
                f"--nodes={self.nodes} and --search exclude each other; give one number"
            )
        return [int(part) for part in parts]


class Calibrate(_OnDevices):
    """Print the device's figures with the factor of each phase that runs measured (metrics.jsonl).

    Peaks, sizes and prices stay as they are for --gpu. Exit code 2: bad input.
    """

    words: ClassVar[tuple[str, ...]] = ("run_dirs",)
    examples: ClassVar[tuple[str, ...]] = (
        "plan calibrate runs/a runs/b > figures.yaml",
        "plan CONFIG --hardware figures.yaml --gpu h100",
    )
    run_dirs: tuple[Path, ...]
    """Directories of runs on one kind of device."""

    def run(self) -> None:
        """Print a file for --hardware."""
        from megatron_opsft.commands.plan.measured import calibrate

        base = load_hardware(
            self.gpu, self.hardware, gpus_per_node=self.gpus_per_node or 8
        )
        say(calibrate(self.run_dirs, base))


PROGRAM = group(
    "plan",
    "Predict memory, time and cost of a run, without a GPU. `plan CONFIG` is `plan run CONFIG`.",
    {"run": PlanRun, "calibrate": Calibrate},
    (PlanRun.examples[0], Calibrate.examples[0]),
)


def show_plan(plan: "Plan") -> str:
    """Memory of the stages that differ, a step in seconds, what is to be said, and the verdict."""
    sections = (_headline, _memory_table, _checkpoint, _disk, _step_table)
    parts = [section(plan) for section in sections]
    notes = [f"note: {note}" for note in plan.notes]
    return "\n\n".join([*parts, "\n".join([*notes, verdict_line(plan)])])


def verdict_line(plan: "Plan") -> str:
    """Fits or not, with the margin, and what the run takes."""
    if plan.problems:
        return "DOES NOT FIT. " + "; ".join(plan.problems)
    rank, hours = plan.worst, plan.hours
    time = f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.1f} minutes"
    cost = f"{plan.num_steps} steps take {time}, {plan.device_hours:,.1f} device-hours"
    if plan.price:
        cost += f", ${plan.price:,.0f}"
    fits = "FITS" if plan.is_safe else "FITS TIGHTLY"
    spare = f"{rank.margin / 1e9:.1f} GB ({rank.margin / rank.limit:.0%})"
    return (
        f"{fits}, with {spare} to spare on stage {rank.stage.index}. {cost}. "
        f"Bottleneck: {plan.bottleneck}."
    )


def _headline(plan: "Plan") -> str:
    job, parallel, rollout = plan.job, plan.job.parallel, plan.job.config.rollout
    layout = f"TP {parallel.tp} x PP {parallel.pp} x DP {job.dp}"
    layout += f" x CP {parallel.cp}" * (parallel.cp > 1)
    layout += f", experts EP {parallel.ep} x TP {parallel.expert_tp}" * (
        parallel.ep > 1
    )
    layout += f", {parallel.vpp} virtual stages" * bool(parallel.vpp)
    return (
        f"{job.num_parameters / 1e9:.2f} B parameters on {job.world_size} x {job.hardware.name}: "
        f"{layout}; {job.num_engines} x {rollout.engine} engine of {rollout.tp}; recompute "
        f"{job.config.train.recompute}; loss {job.cross_entropy.kind} "
        f"({job.cross_entropy.reason})"
    )


def _table(rows: Sequence[Mapping[str, str]], *words: str) -> str:
    """words: columns of them; all others have figures, which end below each other."""
    align = ["left" if column in words else "right" for column in rows[0]]
    return tabulate(rows, headers="keys", disable_numparse=True, colalign=align)


def _memory_table(plan: "Plan") -> str:
    # Those between hold as many layers, and fewer activations from stage to stage.
    pp = len(plan.memory)
    ranks = [
        plan.memory[stage]
        for stage in sorted({0, min(1, pp - 1), max(0, pp - 2), pp - 1})
    ]
    rows = {
        "millions of parameters": [
            f"{r.stage.num_parameters / 1e6:,.1f}" for r in ranks
        ]
    }
    for name in ranks[0].terms:
        called = (
            plan.frozen_copy if name == "reference_model" else name.replace("_", " ")
        )
        rows[called] = [_gb(rank.terms[name]) for rank in ranks]
    for phase in ranks[0].phases:
        rows[f"in {phase}"] = [_gb(rank.phases[phase]) for rank in ranks]
    rows["margin"] = [_gb(rank.margin) for rank in ranks]
    title = f"GB on one rank of {plan.worst.limit / 1e9:.1f}, stage"
    stages = [str(rank.stage.index) for rank in ranks]
    lines = [
        {title: row} | dict(zip(stages, shown, strict=True))
        for row, shown in rows.items()
    ]
    return _table(lines, title)


def _disk(plan: "Plan") -> str:
    use = plan.disk
    return (
        f"disk: up to {_gb(use.checkpoints)} GB of checkpoints (checkpoint.keep={use.keep}, and "
        f"the one that is written), {_gb(use.models)} GB of models, and {_gb(use.rollouts)} GB of "
        "responses if all are as long as they may be"
    )


def _checkpoint(plan: "Plan") -> str:
    saved, bandwidth = plan.checkpoint, plan.checkpoint["bandwidth"]
    text = (
        f"checkpoint: {_gb(saved['total_bytes'])} GB; a node writes {_gb(saved['saved_bytes'])} GB "
        f"from as much host memory (of {_gb(plan.host_bytes_per_node)}) in "
        f"{saved['saved_bytes'] / bandwidth:,.1f} s behind the next steps, and reads "
        f"{_gb(saved['resume_bytes'])} GB in {saved['resume_bytes'] / bandwidth:,.1f} s to resume"
    )
    if plan.pinned_bytes:
        text += (
            f"\na node pins {_gb(saved['saved_bytes'])} GB of its host memory for the copy of a "
            "checkpoint"
        )
    if plan.reference_host_bytes:
        text += (
            f" and {_gb(plan.reference_host_bytes)} GB for the {plan.frozen_copy}: "
            f"{_gb(plan.pinned_bytes)} GB in all"
        )
    return text


def _gb(num_bytes: float) -> str:
    return (
        f"{num_bytes / 1e9:,.3f}" if abs(num_bytes) < 1e9 else f"{num_bytes / 1e9:,.1f}"
    )


def _step_table(plan: "Plan") -> str:
    step, total = plan.step, plan.step["total"]
    rate = f"{plan.tokens_per_second:,.0f} sampled tokens/s"
    about = plan.phases | {
        "total": f"{rate}; MFU of the step {plan.utilization(total):.1%}"
    }
    rows = [
        {
            "phase": name,
            "seconds": f"{step[name]:.2f}",
            "share": "" if name == "total" else f"{step[name] / total:.0%}",
            "of which": text,
        }
        for name, text in about.items()
    ]
    return _table(rows, "phase", "of which")


def show_nodes(plans: Sequence["Plan"]) -> str:
    """The same run on several numbers of nodes, a row each. Efficiency: tokens a second and device,
    as a share of the first row's.
    """
    rates = [plan.tokens_per_second / plan.job.world_size for plan in plans]
    rows = [
        {
            "GPUs": f"{plan.job.world_size:,}",
            **_row(plan),
            "tokens/s": f"{plan.tokens_per_second:,.0f}",
            "efficiency": f"{rate / rates[0]:.1%}" if rate else "",
            "hours": f"{plan.hours:,.1f}",
            "cost": f"${plan.price:,.0f}",
        }
        for plan, rate in zip(plans, rates, strict=True)
    ]
    return _table(rows)


def show_found(found: Sequence["Plan"]) -> str:
    """The first of all layouts of a search, best first."""
    rows = [
        _row(plan) | {"overrides": " ".join(plan.overrides)}
        for plan in found[:_NUM_SHOWN]
    ]
    verdict = "NOTHING FITS with 5 % to spare: take more or larger devices."
    if found[0].is_safe:
        verdict = f"use: {' '.join(found[0].overrides)}\n{verdict_line(found[0])}"
    return (
        f"the best of {len(found)} layouts\n\n{_table(rows, 'overrides')}\n\n{verdict}"
    )


def _row(plan: "Plan") -> dict[str, str]:
    shown = {"step s": "total", "rollout": "rollout", "train": "train", "sync": "sync"}
    return {column: f"{plan.step[name]:.2f}" for column, name in shown.items()} | {
        "margin GB": _gb(plan.worst.margin),
        "fits": "yes" if plan.is_safe else "no" if plan.problems else "tight",
    }
