"""The measured steps of runs beside their plans.

They give the factors of a device (`plan calibrate`), and the report of one run on 1, 2, 4, ...
nodes, which `slurm/scaling.sh` makes in folders nodes_1, nodes_2, ...
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import truediv
from pathlib import Path
from statistics import median
from typing import NamedTuple

from megatron_opsft.commands.plan.assumptions import (
    PHASES,
    Hardware,
    load_hardware,
    measured_workload,
)
from megatron_opsft.commands.report.chart import Chart, Series
from megatron_opsft.commands.report.contents import Contents
from megatron_opsft.commands.report.page import write_page
from megatron_opsft.commands.report.page_sections import PageSection
from megatron_opsft.commands.report.table import Table, aligned
from megatron_opsft.config import Config
from megatron_opsft.config.load import load_config
from megatron_opsft.errors import UserError
from megatron_opsft.records import JsonObject, record
from megatron_opsft.run.run_files import is_skipped, read_json_lines
from megatron_opsft.run.start.run_directory import RunDir
from megatron_opsft.runtime.formatting import count_of, number

_WARM_UP_STEPS = 2  # the first steps compile, allocate, and stream the first weights
_SECONDS = ("step", *PHASES, "other")


class ComparedStep(NamedTuple):
    """A step of a run beside its plan.

    Both mappings hold seconds of the whole `step`, of each phase and of all `other` work, and
    `rate`, sampled tokens a second.
    """

    measured: dict[str, float]
    """Seconds on rank 0."""
    planned: dict[str, float]


def read_measured_run(path: Path) -> tuple[Config, JsonObject]:
    """Read config.yaml and manifest.json of a run directory and check that it has a `world_size`.

    Errors: `UserError` for what is missing or damaged.
    """
    config = load_config(path / "config.yaml")
    manifest = RunDir(path).read_manifest() or {}
    if type(manifest.get("world_size")) is not int:
        raise UserError(
            f"{path}/manifest.json is damaged: its world_size is not a number"
        )
    return config, manifest


def read_steps(
    path: Path, config: Config, hardware: Hardware, world_size: int
) -> list[ComparedStep]:
    """Read the steps of a run, after the first two, that had an update, and plan each of them.

    Errors: `UserError` for a damaged line, for a run that could not start, and if no step is left.
    """
    from megatron_opsft.commands.plan.job import check_planned_run, make_planned_run
    from megatron_opsft.commands.plan.seconds import estimate_step

    run = make_planned_run(config, hardware, world_size)
    check_planned_run(run)
    required = ["trained_tokens", "step_seconds"]
    required += [f"{phase}_seconds" for phase in PHASES]
    lines = read_json_lines(path / "metrics.jsonl", required=required)
    steps = []
    for metrics in lines[_WARM_UP_STEPS:]:
        if is_skipped(metrics):
            continue
        workload = measured_workload(run.config, metrics)
        planned = estimate_step(replace(run, workload=workload))
        planned["step"] = planned["total"]
        measured = {name: metrics[f"{name}_seconds"] for name in ("step", *PHASES)}
        num_tokens = metrics["num_rollouts"] * metrics["mean_response_tokens"]
        for seconds in (measured, planned):
            in_phases = sum(seconds[phase] for phase in PHASES)
            seconds["other"] = max(0.0, seconds["step"] - in_phases)
            seconds["rate"] = num_tokens / seconds["step"]
        steps.append(ComparedStep(measured, planned))
    if not steps:
        raise UserError(
            f"{path}: metrics.jsonl has no step with an update after the first {_WARM_UP_STEPS}"
        )
    return steps


def calibrate(run_dirs: Sequence[Path], base: Hardware) -> str:
    """Write a file for --hardware: `base` with factors that runs measured.

    With its factor a phase's median step takes as long as in the runs. A phase that no run has
    keeps its factor. Errors: `UserError`, see `read_measured_run` and `read_steps`.
    """
    steps: list[ComparedStep] = []
    for path in run_dirs:
        config, manifest = read_measured_run(path)
        steps += read_steps(path, config, base, manifest["world_size"])
    names = ", ".join(path.name for path in run_dirs)
    lines = [
        f"# Factors from {names}, by `megatron-opsft plan calibrate`.",
        f"{base.name}:",
    ]
    for key, value in base.model_dump(exclude={"name", "gpus_per_node"}).items():
        phase, remark = key.removesuffix("_factor"), ""
        pairs = [
            (step.measured[phase], step.planned[phase])
            for step in steps
            if step.measured.get(phase) and step.planned.get(phase)
        ]
        if pairs:
            measured, planned = zip(*pairs, strict=True)
            remark = (
                f"  # measured {median(measured):.3f} s, planned {median(planned):.3f} s "
                f"by {value:.4g}"
            )
            value *= median(map(truediv, measured, planned))
        lines.append(f"  {key}: {value!r}{remark}")
    return "\n".join(lines)


@record
class ScalingRow:
    """One run of a scaling experiment."""

    nodes: int
    gpus: int
    device: str
    """The device that is planned for."""
    steps: int
    """Number of steps behind each median."""
    measured: dict[str, float]
    """Medians of the values of `ComparedStep`, with the rate of one GPU. `_add_efficiency` adds
    `efficiency`: the rate as a share of the first run's.
    """
    planned: dict[str, float]
    """The same keys."""


def scaling_runs(folder: Path) -> list[Path]:
    """Find the runs nodes_N in a folder, ordered by N; none if it is no scaling experiment."""
    runs = {}
    for path in folder.glob("nodes_*"):
        suffix = path.name.removeprefix("nodes_")
        if suffix.isdecimal() and path.is_dir():
            runs[path] = int(suffix)
    return sorted(runs, key=runs.__getitem__)


def read_scaling(
    runs: Sequence[Path], gpu: str | None, hardware: Path | None
) -> Contents:
    """Report the runs that can be read: a table, charts and a page.

    gpu: device to plan for; None: cpu for runs on CPUs, otherwise h100. hardware: file of figures,
    as for `plan calibrate`. `Contents.error` counts the runs that could not be read and gives the
    first reason. Errors: that `UserError`, if no run could be read.
    """
    rows = []
    lines = []
    errors = []
    for run in runs:
        try:
            rows.append(read_row(run, gpu, hardware))
        except UserError as error:
            errors.append(error)
            lines.append(f"{run}: not read: {error}")
    failure = None
    if errors:
        failure = UserError(
            f"{len(errors)} of {len(runs)} could not be read: {errors[0]}"
        )
        if not rows:
            raise failure
    _add_efficiency([row.measured for row in rows])
    _add_efficiency([row.planned for row in rows])
    table = _table(rows)
    section = _section(rows, table)
    title = runs[0].resolve().parent.name
    lines.append(
        f"{table.caption}\n\n{aligned(table.headings, table.rows, num_left=0)}"
    )
    return Contents(
        text="\n".join(lines),
        write_page=lambda out: write_page(out, [], title=title, sections=[section]),
        sections=[section],
        tables=[table],
        error=failure,
    )


def _add_efficiency(runs: Sequence[dict[str, float]]) -> None:
    """Add `efficiency`, the rate as a share of the first run's, to the values of each run."""
    for values in runs:
        values["efficiency"] = values["rate"] / runs[0]["rate"]


def read_row(run: Path, gpu: str | None, hardware: Path | None) -> ScalingRow:
    """Read the medians of a run, without its efficiency. gpu, hardware: as for `read_scaling`.

    The first two steps are left out, since the run's start is in them. Errors: `UserError`.
    """
    config, manifest = read_measured_run(run)
    gpus, nodes = manifest["world_size"], int(run.name.removeprefix("nodes_"))
    if nodes < 1 or gpus % nodes:
        raise UserError(
            f"{run}: a run of {gpus} ranks was not on {nodes} nodes; rename it"
        )
    if not gpu:
        torch_version = str(manifest.get("versions", {}).get("torch"))
        on_cpu = config.run.device == "cpu" or torch_version.endswith("+cpu")
        gpu = "cpu" if on_cpu else "h100"
    device = load_hardware(gpu, hardware, gpus_per_node=gpus // nodes)
    steps = read_steps(run, config, device, gpus)
    measured = _medians([step.measured for step in steps])
    planned = _medians([step.planned for step in steps])
    measured["rate"] /= gpus
    planned["rate"] /= gpus
    return ScalingRow(
        nodes=nodes,
        gpus=gpus,
        device=gpu,
        steps=len(steps),
        measured=measured,
        planned=planned,
    )


def _medians(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: median(step[key] for step in steps) for key in (*_SECONDS, "rate")}


def _table(rows: Sequence[ScalingRow]) -> Table:
    """Lay out one line for each run; the plan's figures are in brackets."""
    formats = dict.fromkeys(_SECONDS, "{:.2f} ({:.2f})")
    formats |= {"rate": "{:,.1f} ({:,.1f})", "efficiency": "{:.0%} ({:.0%})"}
    lines = []
    for row in rows:
        cells = [str(row.nodes), str(row.gpus)]
        for key, text in formats.items():
            cells.append(text.format(row.measured[key], row.planned[key]))
        lines.append(cells)
    devices = ", ".join(dict.fromkeys(row.device for row in rows))
    num_steps = count_of([row.steps for row in rows])
    return Table(
        caption=f"Median seconds of a step, measured (planned for {devices})",
        headings=["nodes", "GPUs", *_SECONDS, "tokens/s/GPU", "efficiency"],
        rows=lines,
        num_left=0,
        note=f"n = {num_steps} steps a row; medians have no intervals",
    )


def _section(rows: Sequence[ScalingRow], table: Table) -> PageSection:
    """Draw seconds by phase and efficiency over nodes, below the table."""
    seconds = {key: (key, "") for key in _SECONDS}
    return PageSection(
        title=table.caption,
        text="Lines: measured; dots: planned. Efficiency: sampled tokens a second and GPU.",
        table=table,
        plots=[
            _chart(
                rows,
                seconds,
                "seconds_by_nodes",
                "Seconds of a step",
                "seconds of a step",
            ),
            _chart(
                rows,
                {"efficiency": ("measured", "planned")},
                "efficiency_by_nodes",
                "Efficiency",
                "efficiency",
                show="{:.0%}".format,
            ),
        ],
    )


def _chart(
    rows: Sequence[ScalingRow],
    labels: Mapping[str, tuple[str, str]],
    name: str,
    title: str,
    y: str,
    show: Callable[[float], str] = number,
) -> Chart:
    """Draw values over the number of nodes: measured ones as lines, planned ones as dots.

    labels: key of a value -> labels of its line and of its dots.
    """
    num_steps = f"{count_of([row.steps for row in rows])} steps a point"
    series = []
    for colour, (key, (label, planned_label)) in enumerate(labels.items()):
        line = Series(
            label=label,
            style_index=colour,
            points=[(row.nodes, row.measured[key]) for row in rows],
            n=num_steps,
        )
        points = [(row.nodes, row.planned[key]) for row in rows]
        dots = replace(line, label=planned_label, points=points, kind="held")
        series += [line, dots]
    return Chart(
        name=name,
        title=title,
        y=y,
        series=series,
        x="nodes",
        show=show,
        from_zero=True,
        log_x=True,
        remark="medians; lines: measured; dots: planned",
    )
