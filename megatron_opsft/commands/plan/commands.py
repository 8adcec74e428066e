"""`megatron-opsft plan`: its commands, and the text that they print of a plan."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field
from tabulate import tabulate

from megatron_opsft.commands.command_line import Command, RunCommand, group
from megatron_opsft.commands.plan.assumptions import PAPER_ACCEPTANCE, load_hardware
from megatron_opsft.config import Config
from megatron_opsft.errors import ANSWER_IS_NO, UserError
from megatron_opsft.runtime.console import say

if TYPE_CHECKING:
    from megatron_opsft.commands.plan.estimate import Plan
    from megatron_opsft.commands.plan.job import PlannedRun

_NUM_SHOWN = 5  # layouts that a search prints


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
        """Print what the run takes. Returns the exit code, which says if it fits."""
        node_counts = self._node_counts()
        config = self.load()
        if config.run.steps < 1:
            raise UserError("run.steps=0 costs nothing; set run.steps above 0")
        ranks_per_node, note = self.gpus_per_node or 8, ""
        if self.gpu == "cpu" and self.gpus_per_node is None:
            ranks_per_node = _fewest_ranks(config)
            note = (
                f"ranks of a node: {ranks_per_node}, as the layout needs; "
                "others with --gpus-per-node\n\n"
            )
        device = load_hardware(self.gpu, self.hardware, gpus_per_node=ranks_per_node)
        from megatron_opsft.commands.plan.job import make_planned_run  # heavy

        first = make_planned_run(
            config,
            device,
            node_counts[0] * ranks_per_node,
            mean_tokens=self.mean_tokens,
            acceptance=self.acceptance,
        )
        if self.search:
            answer = _search(first)
        else:
            world_sizes = [count * ranks_per_node for count in node_counts]
            answer = _plan([replace(first, world_size=size) for size in world_sizes])
        say(json.dumps(answer.as_json) if self.as_json else note + answer.text)
        return 0 if answer.fits else ANSWER_IS_NO

    def _node_counts(self) -> list[int]:
        """Read --nodes. Errors: `UserError`, also for several numbers in a search."""
        words = self.nodes.split(",")
        if not all(word.isdecimal() and int(word) for word in words):
            raise UserError(
                f"--nodes={self.nodes} must be a number of nodes, or several: 1,8,64"
            )
        if self.search and len(words) > 1:
            raise UserError(
                f"--nodes={self.nodes} and --search exclude each other; give one number"
            )
        return [int(word) for word in words]


def _fewest_ranks(config: Config) -> int:
    """Return the smallest number of ranks that can have the layout and its engine."""
    parallel = config.parallel
    expert_ranks = 1
    if parallel.ep > 1:
        expert_ranks = parallel.expert_tp * parallel.ep * parallel.pp
    return lcm(parallel.replica_size, expert_ranks, config.rollout.tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What the command prints."""

    fits: bool
    as_json: dict[str, Any]
    text: str


def _search(run: "PlannedRun") -> _Answer:
    """Search for the fastest layout. Errors: `UserError`."""
    from megatron_opsft.commands.plan.search import search_layouts

    plans = search_layouts(run, run.config.run.steps)
    fits = plans[0].is_safe
    layouts = [
        {"overrides": plan.overrides, **plan.as_json()} for plan in plans[:_NUM_SHOWN]
    ]
    return _Answer(
        fits=fits,
        as_json={"fits": fits, "layouts": layouts},
        text=show_layouts(plans),
    )


def _plan(runs: "Sequence[PlannedRun]") -> _Answer:
    """Plan a run on one number of nodes or on several. Errors: `UserError`."""
    from megatron_opsft.commands.plan.estimate import Plan
    from megatron_opsft.commands.plan.job import check_planned_run

    for run in runs:
        check_planned_run(run)
    plans = [Plan(run=run, num_steps=run.config.run.steps) for run in runs]
    fits = not any(plan.problems for plan in plans)
    if len(plans) == 1:
        return _Answer(fits=fits, as_json=plans[0].as_json(), text=show_plan(plans[0]))
    as_json = {"runs": [plan.as_json() for plan in plans]}
    return _Answer(fits=fits, as_json=as_json, text=show_nodes(plans))


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
    """Describe a plan: memory, checkpoints, disk, the seconds of a step, notes and the verdict."""
    sections = [
        _headline(plan),
        _memory_table(plan),
        _describe_checkpoint(plan),
        _describe_disk(plan),
        _step_table(plan),
    ]
    closing = [*(f"note: {note}" for note in plan.notes), verdict_line(plan)]
    return "\n\n".join([*sections, "\n".join(closing)])


def verdict_line(plan: "Plan") -> str:
    """Say if the run fits, with the margin, and what it takes."""
    if plan.problems:
        return "DOES NOT FIT. " + "; ".join(plan.problems)
    duration = f"{plan.hours:.1f} hours"
    if plan.hours < 1:
        duration = f"{plan.hours * 60:.1f} minutes"
    cost = (
        f"{plan.num_steps} steps take {duration}, {plan.device_hours:,.1f} device-hours"
    )
    if plan.price:
        cost += f", ${plan.price:,.0f}"
    rank = plan.worst
    verdict = "FITS" if plan.is_safe else "FITS TIGHTLY"
    spare = f"{rank.margin / 1e9:.1f} GB ({rank.margin / rank.limit:.0%})"
    return (
        f"{verdict}, with {spare} to spare on stage {rank.stage.index}. {cost}. "
        f"Bottleneck: {plan.bottleneck}."
    )


def _headline(plan: "Plan") -> str:
    run = plan.run
    return (
        f"{run.num_parameters / 1e9:.2f} B parameters on {run.world_size} x "
        f"{run.hardware.name}: {_describe_layout(run)}; "
        f"{run.num_engines} x {run.rollout.engine} engine of {run.rollout.tp}; recompute "
        f"{run.train.recompute}; loss {run.cross_entropy.method} "
        f"({run.cross_entropy.reason})"
    )


def _describe_layout(run: "PlannedRun") -> str:
    parallel = run.parallel
    layout = f"TP {parallel.tp} x PP {parallel.pp} x DP {run.dp}"
    if parallel.cp > 1:
        layout += f" x CP {parallel.cp}"
    if parallel.ep > 1:
        layout += f", experts EP {parallel.ep} x TP {parallel.expert_tp}"
    if parallel.vpp:
        layout += f", {parallel.vpp} virtual stages"
    return layout


def _table(rows: Sequence[Mapping[str, str]], *text_columns: str) -> str:
    """Lay out rows of column -> cell; all columns but `text_columns` are aligned to the right."""
    align = ["left" if column in text_columns else "right" for column in rows[0]]
    return tabulate(rows, headers="keys", disable_numparse=True, colalign=align)


def _memory_table(plan: "Plan") -> str:
    """Lay out the memory of the first two and the last two stages.

    The stages between them have as many layers, and from one to the next fewer activations.
    """
    last = len(plan.memory) - 1
    shown = sorted({0, min(1, last), max(0, last - 1), last})
    ranks = [plan.memory[index] for index in shown]
    title = f"GB on one rank of {plan.worst.limit / 1e9:.1f}, stage"
    millions = [f"{rank.stage.num_parameters / 1e6:,.1f}" for rank in ranks]
    figures = {"millions of parameters": millions}
    for term in ranks[0].terms:
        name = term.replace("_", " ")
        if term == "reference_model":
            name = plan.frozen_copy
        figures[name] = [_gb(rank.terms[term]) for rank in ranks]
    for phase in ranks[0].phases:
        figures[f"in {phase}"] = [_gb(rank.phases[phase]) for rank in ranks]
    figures["margin"] = [_gb(rank.margin) for rank in ranks]
    stages = [str(rank.stage.index) for rank in ranks]
    rows = []
    for name, cells in figures.items():
        rows.append({title: name} | dict(zip(stages, cells, strict=True)))
    return _table(rows, title)


def _describe_disk(plan: "Plan") -> str:
    use = plan.disk
    return (
        f"disk: up to {_gb(use.checkpoints)} GB of checkpoints (checkpoint.keep={use.keep}, and "
        f"the one that is written), {_gb(use.models)} GB of models, and {_gb(use.rollouts)} GB of "
        "responses if all are as long as they may be"
    )


def _describe_checkpoint(plan: "Plan") -> str:
    total, saved = plan.checkpoint["total_bytes"], plan.checkpoint["saved_bytes"]
    resume, bandwidth = plan.checkpoint["resume_bytes"], plan.checkpoint["bandwidth"]
    text = (
        f"checkpoint: {_gb(total)} GB; a node writes {_gb(saved)} GB "
        f"from as much host memory (of {_gb(plan.host_bytes_per_node)}) in "
        f"{saved / bandwidth:,.1f} s behind the next steps, and reads "
        f"{_gb(resume)} GB in {resume / bandwidth:,.1f} s to resume"
    )
    if plan.pinned_bytes:
        text += (
            f"\na node pins {_gb(saved)} GB of its host memory for the copy of a "
            "checkpoint"
        )
    if plan.reference_host_bytes:
        text += (
            f" and {_gb(plan.reference_host_bytes)} GB for the {plan.frozen_copy}: "
            f"{_gb(plan.pinned_bytes)} GB in all"
        )
    return text


def _gb(num_bytes: float) -> str:
    if abs(num_bytes) < 1e9:
        return f"{num_bytes / 1e9:,.3f}"
    return f"{num_bytes / 1e9:,.1f}"


def _step_table(plan: "Plan") -> str:
    total = plan.step["total"]
    rows = []
    for phase, description in plan.phases.items():
        seconds = plan.step[phase]
        rows.append(
            {
                "phase": phase,
                "seconds": f"{seconds:.2f}",
                "share": f"{seconds / total:.0%}",
                "of which": description,
            }
        )
    rate = f"{plan.tokens_per_second:,.0f} sampled tokens/s"
    rows.append(
        {
            "phase": "total",
            "seconds": f"{total:.2f}",
            "share": "",
            "of which": f"{rate}; MFU of the step {plan.utilization(total):.1%}",
        }
    )
    return _table(rows, "phase", "of which")


def show_nodes(plans: Sequence["Plan"]) -> str:
    """Lay out one run on several numbers of nodes, one row each.

    Efficiency: tokens a second and device, as a share of the first row's.
    """
    rows = []
    first_rate = plans[0].tokens_per_second / plans[0].run.world_size
    for plan in plans:
        rate = plan.tokens_per_second / plan.run.world_size
        rows.append(
            {
                "GPUs": f"{plan.run.world_size:,}",
                **_row(plan),
                "tokens/s": f"{plan.tokens_per_second:,.0f}",
                "efficiency": f"{rate / first_rate:.1%}" if rate else "",
                "hours": f"{plan.hours:,.1f}",
                "cost": f"${plan.price:,.0f}",
            }
        )
    return _table(rows)


def show_layouts(plans: Sequence["Plan"]) -> str:
    """Lay out the best layouts of a search. plans: all that were planned, best first."""
    best = plans[0]
    rows = [
        _row(plan) | {"overrides": " ".join(plan.overrides)}
        for plan in plans[:_NUM_SHOWN]
    ]
    verdict = "NOTHING FITS with 5 % to spare: take more or larger devices."
    if best.is_safe:
        verdict = f"use: {' '.join(best.overrides)}\n{verdict_line(best)}"
    return (
        f"the best of {len(plans)} layouts\n\n{_table(rows, 'overrides')}\n\n{verdict}"
    )


def _row(plan: "Plan") -> dict[str, str]:
    """Return the columns that both tables of several plans have."""
    fits = "yes"
    if plan.problems:
        fits = "no"
    elif not plan.is_safe:
        fits = "tight"
    return {
        "step s": f"{plan.step['total']:.2f}",
        "rollout": f"{plan.step['rollout']:.2f}",
        "train": f"{plan.step['train']:.2f}",
        "sync": f"{plan.step['sync']:.2f}",
        "margin GB": _gb(plan.worst.margin),
        "fits": fits,
    }
