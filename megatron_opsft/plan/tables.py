"""A plan as people read it."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_opsft.plan.calibrate import Calibration
from megatron_opsft.plan.estimate import RunEstimate
from megatron_opsft.plan.search import FoundLayout


def show_run(run: RunEstimate, notes: Sequence[str]) -> RenderableType:
    """Memory of the stages that differ, a step in seconds, what is to be said, and the verdict."""
    return Group(
        Text(_headline(run)),
        _memory_table(run),
        Text(_checkpoint(run)),
        _step_table(run),
        *(Text(f"note: {note}") for note in notes),
        Text(verdict_line(run), style="bold green" if run.fits else "bold red"),
    )


def verdict_line(run: RunEstimate) -> str:
    """Fits or not, with the margin, and what the run takes."""
    if not run.fits:
        return "DOES NOT FIT. " + "; ".join(run.problems)
    rank = run.worst
    cost = f"{run.num_steps} steps take {_hours(run)}, {run.device_hours:,.1f} device-hours"
    if run.price:
        cost += f", ${run.price:,.0f}"
    fits = "FITS" if run.is_safe else "FITS TIGHTLY"
    spare = f"{rank.margin / 1e9:.1f} GB ({rank.margin / rank.limit:.0%})"
    return (
        f"{fits}, with {spare} to spare on stage {rank.stage.index}. {cost}. "
        f"Bottleneck: {run.bottleneck}."
    )


def _hours(run: RunEstimate) -> str:
    hours = run.step.total * run.num_steps / 3600
    return f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.1f} minutes"


def _headline(run: RunEstimate) -> str:
    job = run.job
    whole = sum(rank.stage.whole_parameters for rank in run.memory)
    layout = f"TP {job.parallel.tp} x PP {job.parallel.pp} x DP {job.dp}"
    if job.parallel.cp > 1:
        layout += f" x CP {job.parallel.cp}"
    if job.parallel.ep > 1:
        layout += f", experts EP {job.parallel.ep} x TP {job.parallel.expert_tp}"
    if job.parallel.vpp:
        layout += f", {job.parallel.vpp} virtual stages"
    engines = f"{job.num_engines} x {job.config.rollout.engine} engine of {job.engine_tp}"
    return (
        f"{whole / 1e9:.2f} B parameters on {job.world_size} x {job.hardware.name}: {layout}; "
        f"{engines}; recompute {job.config.train.recompute}; loss {job.cross_entropy.method} "
        f"({job.cross_entropy.reason})"
    )


def _memory_table(run: RunEstimate) -> Table:
    # Those between hold as many layers, and fewer activations from stage to stage.
    pp = len(run.memory)
    ranks = [run.memory[stage] for stage in sorted({0, min(1, pp - 1), max(0, pp - 2), pp - 1})]
    table = Table(title=f"GB on one rank of {run.worst.limit / 1e9:.1f}", title_justify="left")
    table.add_column("pipeline stage")
    for rank in ranks:
        table.add_column(str(rank.stage.index), justify="right")
    table.add_row("parameters (millions)", *(f"{r.stage.num_parameters / 1e6:,.1f}" for r in ranks))
    for label, of in (
        ("weights", lambda r: r.stage.weight_bytes),
        ("gradients", lambda r: r.stage.gradient_bytes),
        ("optimizer", lambda r: r.stage.optimizer_bytes),
        ("activations", lambda r: r.activations),
        ("backward pass, recomputation", lambda r: r.recompute),
        ("loss", lambda r: r.loss),
        ("reference model", lambda r: r.reference),
        ("push buckets", lambda r: r.push_buckets),
        ("engine weights", lambda r: r.engine_weights),
        ("engine, other", lambda r: r.engine_extra),
        ("KV cache", lambda r: r.kv_cache),
        ("reserved", lambda r: r.reserved),
    ):
        table.add_row(label, *(_gb(of(rank)) for rank in ranks))
    table.add_section()
    for phase in ("rollout", "train", "push"):
        table.add_row(f"in {phase}", *(_gb(getattr(rank, phase)) for rank in ranks))
    table.add_row("margin", *(_gb(rank.margin) for rank in ranks))
    return table


def _checkpoint(run: RunEstimate) -> str:
    saved, there = run.checkpoint, run.job.host_bytes_per_node
    return (
        f"checkpoint: {_gb(saved.total_bytes)} GB; a node writes {_gb(saved.saved_bytes)} GB from "
        f"as much host memory (of {_gb(there)}) in {saved.save_seconds:,.1f} s behind the next "
        f"steps, and reads {_gb(saved.resume_bytes)} GB in {saved.resume_seconds:,.1f} s to resume"
        + _reference(run)
    )


def _reference(run: RunEstimate) -> str:
    if not run.reference_host_bytes:
        return ""
    return f"; the reference model is in {_gb(run.reference_host_bytes)} GB of a node's host memory"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.3f}" if abs(num_bytes) < 1e9 else f"{num_bytes / 1e9:,.1f}"


def _step_table(run: RunEstimate) -> Table:
    step, job, work = run.step, run.job, run.workload
    table = Table(title="One step", title_justify="left")
    for column, justify in (("phase", "left"), ("seconds", "right"), ("share", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    table.add_column("of which")
    method = job.config.method
    trained = "sampled" if method.learns_from_rejected else "accepted"
    sampled = (
        f"{len(work.lengths)} responses of {work.mean_tokens:.0f} tokens on average, {step.slots} "
        f"at once in an engine (its cache holds {run.kv_tokens:,} tokens)"
    )
    if method.has_fixed_data:
        trained, sampled = "stored", "nothing is sampled"
    rows: list[tuple[str, float, str]] = [
        (
            "rollout",
            step.rollout,
            sampled,
        ),
        (
            "verify",
            step.verify,
            f"on {job.cores_per_rank * job.world_size:.0f} CPU cores",
        ),
        ("old log-probs", step.old_logprob, "of the policy that sampled, before several updates"),
        ("reference", step.reference, "log-probs of the reference model, in the model's place"),
        (
            "train",
            step.train,
            f"{len(work.accepted)} {trained} responses, updates: {method.num_updates}, "
            f"{step.num_microbatches} micro-batches a rank; bubbles {step.bubble:.0%}, exchange "
            f"{step.exchange:.2f} s, update {step.update:.2f} s; MFU {run.mfu:.1%}",
        ),
        ("push", step.push, "updated weights into the engines, with proof"),
    ]
    for name, seconds, about in rows:
        if seconds or name not in ("old log-probs", "reference"):
            table.add_row(name, f"{seconds:.2f}", f"{seconds / step.total:.0%}", about)
    table.add_section()
    table.add_row(
        "step",
        f"{step.total:.2f}",
        "",
        f"{run.tokens_per_second:,.0f} sampled tokens/s; MFU of the step {run.step_mfu:.1%}; ranks "
        f"wait {step.waiting / step.total:.0%} of it",
    )
    return table


def show_found(
    found: Sequence[FoundLayout], exact: RunEstimate | None, num_tried: int
) -> RenderableType:
    """The layouts of a search, best first; exact: the plan of the best one."""
    table = Table(title=f"The best of {num_tried} layouts", title_justify="left")
    for column in ("step s", "rollout", "train", "push", "margin GB", "fits"):
        table.add_column(column, justify="right")
    table.add_column("overrides", overflow="fold")
    for one in found:
        step = one.estimate.step
        seconds = (step.total, step.rollout, step.train, step.push)
        table.add_row(
            *(f"{value:.2f}" for value in seconds),
            _gb(one.estimate.worst.margin),
            "yes" if one.estimate.is_safe else "tight" if one.estimate.fits else "no",
            " ".join(one.overrides),
        )
    if exact is None:
        return Group(
            table, Text("NOTHING FITS with 5 % to spare: take more or larger devices.", "bold red")
        )
    return Group(
        table,
        Text(f"use: {' '.join(found[0].overrides)}", style="bold"),
        Text(verdict_line(exact), style="bold green" if exact.fits else "bold red"),
    )


def show_calibration(result: Calibration) -> RenderableType:
    """Figures before and after, and how well they then describe the runs."""
    figures = Table(title="Figures", title_justify="left")
    for column in ("figure", "before", "fitted", "from"):
        figures.add_column(column)
    for name, (before, after, how) in result.changes.items():
        figures.add_row(name, f"{before:.4g}", f"{after:.4g}", how)
    check = Table(title="Seconds of a step, medians", title_justify="left")
    for column in ("run", "phase", "measured", "predicted"):
        check.add_column(column, justify="left" if column in ("run", "phase") else "right")
    for row in result.checks:
        check.add_row(row.run, row.phase, f"{row.measured:.3f}", f"{row.predicted:.3f}")
    return Group(figures, check)
