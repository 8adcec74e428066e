"""A plan as people read it."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_opsft.plan.estimate import RunEstimate
from megatron_opsft.plan.search import FoundLayout

_GREEN, _RED = "bold green", "bold red"


def show_run(run: RunEstimate, notes: Sequence[str]) -> RenderableType:
    """Memory of the stages that differ, a step in seconds, what is to be said, and the verdict."""
    return Group(
        Text(_headline(run)),
        _memory_table(run),
        Text(_checkpoint(run)),
        _step_table(run),
        *(Text(f"note: {note}") for note in notes),
        Text(verdict_line(run), style=_GREEN if run.fits else _RED),
    )


def verdict_line(run: RunEstimate) -> str:
    """Fits or not, with the margin, and what the run takes."""
    if not run.fits:
        return "DOES NOT FIT. " + "; ".join(run.problems)
    rank = run.worst
    hours = run.step.total * run.num_steps / 3600
    time = f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.1f} minutes"
    cost = f"{run.num_steps} steps take {time}, {run.device_hours:,.1f} device-hours"
    if run.price:
        cost += f", ${run.price:,.0f}"
    fits = "FITS" if run.is_safe else "FITS TIGHTLY"
    spare = f"{rank.margin / 1e9:.1f} GB ({rank.margin / rank.limit:.0%})"
    return (
        f"{fits}, with {spare} to spare on stage {rank.stage.index}. {cost}. "
        f"Bottleneck: {run.bottleneck}."
    )


def _headline(run: RunEstimate) -> str:
    job = run.job
    layout = f"TP {job.parallel.tp} x PP {job.parallel.pp} x DP {job.dp}"
    if job.parallel.cp > 1:
        layout += f" x CP {job.parallel.cp}"
    if job.parallel.ep > 1:
        layout += f", experts EP {job.parallel.ep} x TP {job.parallel.expert_tp}"
    if job.parallel.vpp:
        layout += f", {job.parallel.vpp} virtual stages"
    engines = f"{job.num_engines} x {job.config.rollout.engine} engine of {job.engine_tp}"
    return (
        f"{run.num_parameters / 1e9:.2f} B parameters on {job.world_size} x {job.hardware.name}: "
        f"{layout}; {engines}; recompute {job.config.train.recompute}; loss "
        f"{job.cross_entropy.method} ({job.cross_entropy.reason})"
    )


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _memory_table(run: RunEstimate) -> Table:
    # Those between hold as many layers, and fewer activations from stage to stage.
    pp = len(run.memory)
    ranks = [run.memory[stage] for stage in sorted({0, min(1, pp - 1), max(0, pp - 2), pp - 1})]
    stages = [str(rank.stage.index) for rank in ranks]
    table = _table(f"GB on one rank of {run.worst.limit / 1e9:.1f}", ["pipeline stage", *stages])
    table.columns[0].justify = "left"
    table.add_row("parameters (millions)", *(f"{r.stage.num_parameters / 1e6:,.1f}" for r in ranks))
    for label, of in (
        ("weights", lambda r: r.stage.weight_bytes),
        ("gradients", lambda r: r.stage.gradient_bytes),
        ("optimizer", lambda r: r.stage.optimizer_bytes),
        ("activations", lambda r: r.activations),
        ("backward pass, recomputation", lambda r: r.recompute),
        ("loss", lambda r: r.loss),
        ("reference model", lambda r: r.reference),
        ("sync buckets", lambda r: r.sync_buckets),
        ("engine weights", lambda r: r.engine.weights),
        ("engine, other", lambda r: r.engine.extra),
        ("KV cache", lambda r: r.engine.kv_cache),
        ("reserved", lambda r: r.reserved),
    ):
        table.add_row(label, *(_gb(of(rank)) for rank in ranks))
    table.add_section()
    for phase in ranks[0].phases:
        table.add_row(f"in {phase}", *(_gb(rank.phases[phase]) for rank in ranks))
    table.add_row("margin", *(_gb(rank.margin) for rank in ranks))
    return table


def _checkpoint(run: RunEstimate) -> str:
    saved, there = run.checkpoint, run.job.host_bytes_per_node
    to_save, to_resume = (n / saved.bandwidth for n in (saved.saved_bytes, saved.resume_bytes))
    text = (
        f"checkpoint: {_gb(saved.total_bytes)} GB; a node writes {_gb(saved.saved_bytes)} GB from "
        f"as much host memory (of {_gb(there)}) in {to_save:,.1f} s behind the next steps, and "
        f"reads {_gb(saved.resume_bytes)} GB in {to_resume:,.1f} s to resume"
    )
    if run.reference_host_bytes:
        on_host = _gb(run.reference_host_bytes)
        text += f"; the reference model is in {on_host} GB of a node's host memory"
    return text


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.3f}" if abs(num_bytes) < 1e9 else f"{num_bytes / 1e9:,.1f}"


def _step_table(run: RunEstimate) -> Table:
    step, job, work = run.step, run.job, run.workload
    table = _table("One step", ["phase", "seconds", "share", "of which"])
    table.columns[0].justify = table.columns[-1].justify = "left"
    method, training = job.config.method, step.training
    trained = "sampled" if method.learns_from_rejected else "accepted"
    sampled = (
        f"{len(work.lengths)} responses of {work.mean_tokens:.0f} tokens on average, "
        f"{step.sampling.slots} at once in an engine (its cache holds {run.kv_tokens:,} tokens)"
    )
    if method.has_fixed_data:
        trained, sampled = "stored", "nothing is sampled"
    cores = job.hardware.cpu_cores * job.world_size
    for name, seconds, about in (
        ("rollout", step.rollout, sampled),
        ("verify", step.verify, f"on {cores:.0f} CPU cores"),
        ("old log-probs", step.old_logprob, "of the policy that sampled, before several updates"),
        ("reference", step.reference, "log-probs of the reference model, in the model's place"),
        (
            "train",
            step.train,
            f"{len(work.trained)} {trained} responses, updates: {method.num_updates}, "
            f"{training.num_microbatches} micro-batches a rank; bubbles {training.bubble:.0%}, "
            f"exchange {training.exchange:.2f} s, update {training.update:.2f} s; MFU "
            f"{run.utilization(step.train):.1%}",
        ),
        ("sync", step.sync, "updated weights into the engines, with proof"),
    ):
        if seconds or name not in ("old log-probs", "reference"):
            table.add_row(name, f"{seconds:.2f}", f"{seconds / step.total:.0%}", about)
    table.add_section()
    about = f"{run.tokens_per_second:,.0f} sampled tokens/s; MFU of the step "
    about += f"{run.utilization(step.total):.1%}"
    table.add_row("step", f"{step.total:.2f}", "", about)
    return table


def show_nodes(runs: Sequence[RunEstimate]) -> RenderableType:
    """The same run on several numbers of nodes, a row each. Efficiency: tokens a second and device,
    as a share of the first row's.
    """
    more = ("tokens/s", "efficiency", "hours", "cost")
    table = _table("One step, and the run", ["GPUs", *_IN_A_ROW, *more])
    first = runs[0].tokens_per_second / runs[0].job.world_size
    for run in runs:
        world_size = run.job.world_size
        table.add_row(
            f"{world_size:,}",
            *_row(run),
            f"{run.tokens_per_second:,.0f}",
            f"{run.tokens_per_second / world_size / first:.1%}" if first else "",
            f"{run.step.total * run.num_steps / 3600:,.1f}",
            f"${run.price:,.0f}",
        )
    return table


def show_found(found: Sequence[FoundLayout], num_tried: int) -> RenderableType:
    """The layouts of a search, best first."""
    table = _table(f"The best of {num_tried} layouts", _IN_A_ROW)
    table.add_column("overrides", overflow="fold")
    for one in found:
        table.add_row(*_row(one.estimate), " ".join(one.overrides))
    best = found[0]
    if not best.estimate.is_safe:
        advice = "NOTHING FITS with 5 % to spare: take more or larger devices."
        return Group(table, Text(advice, _RED))
    return Group(
        table,
        Text(f"use: {' '.join(best.overrides)}", style="bold"),
        Text(verdict_line(best.estimate), style=_GREEN),
    )


_IN_A_ROW = ("step s", "rollout", "train", "sync", "margin GB", "fits")


def _row(run: RunEstimate) -> list[str]:
    step = run.step
    seconds = (f"{value:.2f}" for value in (step.total, step.rollout, step.train, step.sync))
    fits = "yes" if run.is_safe else "tight" if run.fits else "no"
    return [*seconds, _gb(run.worst.margin), fits]
