"""A plan as people read it."""

from collections.abc import Mapping, Sequence

from tabulate import tabulate

from megatron_opsft.plan.estimate import Plan
from megatron_opsft.plan.search import FoundLayout


def show_plan(plan: Plan) -> str:
    """Memory of the stages that differ, a step in seconds, what is to be said, and the verdict."""
    parts = [_headline(plan), _memory_table(plan), _checkpoint(plan), _step_table(plan)]
    notes = [f"note: {note}" for note in plan.notes]
    return "\n\n".join([*parts, "\n".join([*notes, verdict_line(plan)])])


def verdict_line(plan: Plan) -> str:
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


def _headline(plan: Plan) -> str:
    job, parallel, rollout = plan.job, plan.job.parallel, plan.job.config.rollout
    layout = f"TP {parallel.tp} x PP {parallel.pp} x DP {job.dp}"
    if parallel.cp > 1:
        layout += f" x CP {parallel.cp}"
    if parallel.ep > 1:
        layout += f", experts EP {parallel.ep} x TP {parallel.expert_tp}"
    if parallel.vpp:
        layout += f", {parallel.vpp} virtual stages"
    return (
        f"{job.num_parameters / 1e9:.2f} B parameters on {job.world_size} x {job.hardware.name}: "
        f"{layout}; {job.num_engines} x {rollout.engine} engine of {rollout.tp}; recompute "
        f"{job.config.train.recompute}; loss {job.cross_entropy.method} "
        f"({job.cross_entropy.reason})"
    )


def _table(rows: Sequence[Mapping[str, str]], *words: str) -> str:
    """words: columns of them; all others have figures, which end below each other."""
    align = ["left" if column in words else "right" for column in rows[0]]
    return tabulate(rows, headers="keys", disable_numparse=True, colalign=align)


def _memory_table(plan: Plan) -> str:
    # Those between hold as many layers, and fewer activations from stage to stage.
    pp = len(plan.memory)
    ranks = [plan.memory[stage] for stage in sorted({0, min(1, pp - 1), max(0, pp - 2), pp - 1})]
    rows = {"millions of parameters": [f"{r.stage.num_parameters / 1e6:,.1f}" for r in ranks]}
    for name in ranks[0].terms:
        called = plan.frozen_copy if name == "reference_model" else name.replace("_", " ")
        rows[called] = [_gb(rank.terms[name]) for rank in ranks]
    for phase in ranks[0].phases:
        rows[f"in {phase}"] = [_gb(rank.phases[phase]) for rank in ranks]
    rows["margin"] = [_gb(rank.margin) for rank in ranks]
    title = f"GB on one rank of {plan.worst.limit / 1e9:.1f}, stage"
    stages = [str(rank.stage.index) for rank in ranks]
    return _table(
        [{title: row} | dict(zip(stages, shown, strict=True)) for row, shown in rows.items()],
        title,
    )


def _checkpoint(plan: Plan) -> str:
    saved, bandwidth = plan.checkpoint, plan.checkpoint["bandwidth"]
    text = (
        f"checkpoint: {_gb(saved['total_bytes'])} GB; a node writes {_gb(saved['saved_bytes'])} GB "
        f"from as much host memory (of {_gb(plan.host_bytes_per_node)}) in "
        f"{saved['saved_bytes'] / bandwidth:,.1f} s behind the next steps, and reads "
        f"{_gb(saved['resume_bytes'])} GB in {saved['resume_bytes'] / bandwidth:,.1f} s to resume"
    )
    if plan.reference_host_bytes:
        on_host = _gb(plan.reference_host_bytes)
        text += f"; the {plan.frozen_copy} is in {on_host} GB of a node's host memory"
    return text


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.3f}" if abs(num_bytes) < 1e9 else f"{num_bytes / 1e9:,.1f}"


def _step_table(plan: Plan) -> str:
    step, total = plan.step, plan.step["total"]
    rows = [(name, f"{step[name] / total:.0%}", about) for name, about in plan.phases.items()]
    about = f"{plan.tokens_per_second:,.0f} sampled tokens/s; MFU of the step "
    rows.append(("total", "", about + f"{plan.utilization(total):.1%}"))
    return _table(
        [
            {"phase": name, "seconds": f"{step[name]:.2f}", "share": share, "of which": about}
            for name, share, about in rows
        ],
        *("phase", "of which"),
    )


def show_nodes(plans: Sequence[Plan]) -> str:
    """The same run on several numbers of nodes, a row each. Efficiency: tokens a second and device,
    as a share of the first row's.
    """
    rates = [plan.tokens_per_second / plan.job.world_size for plan in plans]
    return _table(
        [
            {"GPUs": f"{plan.job.world_size:,}"}
            | _row(plan)
            | {
                "tokens/s": f"{plan.tokens_per_second:,.0f}",
                "efficiency": f"{rate / rates[0]:.1%}" if rate else "",
                "hours": f"{plan.hours:,.1f}",
                "cost": f"${plan.price:,.0f}",
            }
            for plan, rate in zip(plans, rates, strict=True)
        ]
    )


def show_found(found: Sequence[FoundLayout], num_tried: int) -> str:
    """The layouts of a search, best first."""
    rows = [_row(one.plan) | {"overrides": " ".join(one.overrides)} for one in found]
    verdict = "NOTHING FITS with 5 % to spare: take more or larger devices."
    if found[0].plan.is_safe:
        verdict = f"use: {' '.join(found[0].overrides)}\n{verdict_line(found[0].plan)}"
    return f"the best of {num_tried} layouts\n\n{_table(rows, 'overrides')}\n\n{verdict}"


def _row(plan: Plan) -> dict[str, str]:
    shown = {"step s": "total", "rollout": "rollout", "train": "train", "sync": "sync"}
    return {column: f"{plan.step[name]:.2f}" for column, name in shown.items()} | {
        "margin GB": _gb(plan.worst.margin),
        "fits": "yes" if plan.is_safe else "no" if plan.problems else "tight",
    }
