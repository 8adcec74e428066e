"""Plans as text: one plan in full, and several as rows of a table."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tabulate import tabulate

from megatron_opsft.commands.report.table import aligned
from megatron_opsft.config.training import describe_lora
from megatron_opsft.runtime.formatting import number

if TYPE_CHECKING:
    from megatron_opsft.commands.plan.estimate import Plan
    from megatron_opsft.commands.plan.job import PlannedRun

SEARCH_HINT = "(`megatron-opsft plan CONFIG --search` looks for a layout)"
NUM_SHOWN = 5  # layouts that a search prints
_SMALL_MODEL = 10**8  # parameters
# Less would be written as 0.
_LEAST_HOURS = 0.05
_LEAST_PRICE = 0.5


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
    """Say if the run fits, with the margin, what it takes, and what takes longest."""
    line = cost_line(plan)
    return line if plan.problems else f"{line} Bottleneck: {plan.bottleneck}."


def cost_line(plan: "Plan") -> str:
    """Say if the run fits, with the margin, and what it takes."""
    if plan.problems:
        return f"{describe_fit(plan)} {SEARCH_HINT}"
    cost = f"{plan.num_steps} steps take {_describe_hours(plan.hours)}"
    if plan.device_hours >= _LEAST_HOURS:
        cost += f", {plan.device_hours:,.1f} device-hours"
    if plan.price >= _LEAST_PRICE:
        cost += f", ${plan.price:,.0f}"
    return f"{describe_fit(plan)}. {cost}."


def _describe_hours(hours: float) -> str:
    """Write a duration in hours, minutes or seconds, whichever gives at least 1."""
    if hours >= 1:
        return f"{hours:.1f} hours"
    if hours * 60 >= 1:
        return f"{hours * 60:.1f} minutes"
    return f"{hours * 3600:.1f} seconds"


def describe_fit(plan: "Plan") -> str:
    """Say if the run fits: with the margin, or why not and which `train.offload` would help."""
    if plan.problems:
        text = "DOES NOT FIT. " + "; ".join(plan.problems)
        if plan.fitting_offload:
            text += f"; it fits with train.offload={plan.fitting_offload}"
        return text
    rank = plan.worst
    verdict = "FITS" if plan.is_safe else "FITS TIGHTLY"
    spare = f"{rank.margin / 1e9:.1f} GB ({rank.margin / rank.limit:.0%})"
    where = f" on stage {rank.stage.index}" if len(plan.memory) > 1 else ""
    return f"{verdict}, with {spare} to spare{where}"


def _headline(plan: "Plan") -> str:
    run = plan.run
    model = f"{run.num_parameters / 1e9:.2f} B parameters"
    if run.num_parameters < _SMALL_MODEL:
        model = f"{run.num_parameters / 1e6:.1f} M parameters"
    if run.config.lora.rank:
        adapters = f"{number(run.num_trained / 1e6)} M of adapters"
        model += f", {adapters} ({describe_lora(run.config.lora)})"
    measures = f"recompute {run.train.recompute}"
    if run.gives_up("gradients"):
        measures += f"; offload {run.train.offload}"
    return (
        f"{model} on {run.world_size} x {run.hardware.name}: {_describe_layout(run)}; "
        f"{run.num_engines} x {run.rollout.engine} engine of {run.rollout.tp}; {measures}; "
        f"loss {run.cross_entropy.kind} ({run.cross_entropy.reason})"
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
    ends = (*plan.memory[:2], *plan.memory[-2:])
    shown = {str(rank.stage.index): rank for rank in ends}
    title = f"GB on one rank of {plan.worst.limit / 1e9:.1f}, stage"
    terms = [
        term.replace("reference_model", plan.frozen_copy).replace("_", " ")
        for term in plan.worst.terms
    ]
    phases = [f"in {phase}" for phase in plan.worst.phases]
    columns = [["millions of parameters", *terms, *phases, "margin"]]
    for rank in shown.values():
        figures = [*rank.terms.values(), *rank.phases.values(), rank.margin]
        columns.append([f"{rank.stage.num_parameters / 1e6:,.1f}", *map(_gb, figures)])
    return aligned([title, *shown], list(zip(*columns, strict=True)))


def _describe_disk(plan: "Plan") -> str:
    use = plan.disk
    return (
        f"disk: up to {_gb(use.checkpoints)} GB of checkpoints (checkpoint.keep={use.keep}, and "
        f"the one that is written), {_gb(use.models)} GB of models, and {_gb(use.responses)} GB of "
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
        text += f"\na node pins {_describe_pinned(plan)}"
    return text


def _describe_pinned(plan: "Plan") -> str:
    """Say how much host memory a node pins for what."""
    purposes = {
        "the copy of a checkpoint": plan.pinned_copy_bytes,
        f"the {plan.frozen_copy}": plan.reference_host_bytes,
        "what the trainers give up": plan.offload_host_bytes,
    }
    parts = [
        f"{_gb(num_bytes)} GB for {purpose}"
        for purpose, num_bytes in purposes.items()
        if num_bytes
    ]
    text = " and ".join(parts).replace(" for ", " of its host memory for ", 1)
    return f"{text}: {_gb(plan.pinned_bytes)} GB in all" if len(parts) > 1 else text


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
    """Lay out one run on several numbers of nodes, one row each; with the layouts that a search
    found.

    Efficiency: tokens a second and device, as a share of the first row's.
    """
    rows = []
    rates = [plan.tokens_per_second / plan.run.world_size for plan in plans]
    for plan, rate in zip(plans, rates, strict=True):
        rows.append(
            {
                "GPUs": f"{plan.run.world_size:,}",
                **_row(plan),
                "tokens/s": f"{plan.tokens_per_second:,.0f}",
                "efficiency": f"{rate / rates[0]:.1%}" if rate else "",
                "hours": f"{plan.hours:,.1f}",
                "cost": f"${plan.price:,.0f}",
            }
        )
        if plan.overrides:
            rows[-1]["overrides"] = " ".join(plan.overrides)
    return _table(rows, "overrides")


def show_found(plans: Sequence["Plan"], would_fit: Sequence[Sequence[str]]) -> str:
    """Lay out the best layout of each number of nodes, and say for each that is not safe what would
    help. would_fit: for each plan, see `what_would_fit`.
    """
    lines = []
    for plan, changes in zip(plans, would_fit, strict=True):
        if not plan.is_safe:
            devices = f"{plan.run.world_size:,} x {plan.run.hardware.name}"
            lines.append(f"{devices}: {_nothing_fits(changes)}")
    table = show_nodes(plans)
    return f"{table}\n\n" + "\n".join(lines) if lines else table


def _nothing_fits(would_fit: Sequence[str]) -> str:
    """Say that no layout is safe, and what would help."""
    advice = ": take more or larger devices"
    if would_fit:
        advice = f"; a search finds a layout with {', or with '.join(would_fit)}"
    return f"NOTHING FITS with 5 % to spare{advice}."


def show_layouts(plans: Sequence["Plan"], would_fit: Sequence[str]) -> str:
    """Lay out the best layouts of a search. plans: all that were planned, best first. would_fit:
    what would help if none is safe, see `what_would_fit`.
    """
    best = plans[0]
    rows = [
        _row(plan) | {"overrides": " ".join(plan.overrides)}
        for plan in plans[:NUM_SHOWN]
    ]
    verdict = _nothing_fits(would_fit)
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
        **{phase: f"{plan.step[phase]:.2f}" for phase in ("rollout", "train", "sync")},
        "margin GB": _gb(plan.worst.margin),
        "fits": fits,
    }
