"""What the steps of runs took, beside their plan: the factors of a device from it, and how the same
run does on 1, 2, 4, ... nodes, which `slurm/scaling.sh` makes in folders nodes_1, nodes_2, ...
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

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
from megatron_opsft.run.run_files import is_skipped, read_json_lines
from megatron_opsft.run.start.run_directory import RunDir
from megatron_opsft.runtime.formatting import count_of

_WARM_UP_STEPS = 2  # the first ones compile, allocate, and stream the first weights
_SECONDS = ("step", *PHASES, "other")

Steps = list[tuple[dict[str, float], dict[str, float]]]
"""(measured on rank 0, planned) of each step: seconds of the whole `step`, of each phase and of all
`other` work, and `rate`, sampled tokens a second.
"""


def read_run(path: Path) -> tuple[Config, dict[str, Any]]:
    """config.yaml and manifest.json of a run directory, whose `world_size` is a number.

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
) -> Steps:
    """The steps of a run directory with an update, without the first ones, each beside its plan.

    Errors: `UserError` for a damaged line, for a job that cannot be, and where no step is left.
    """
    from megatron_opsft.commands.plan.job import check_job, make_job  # heavy
    from megatron_opsft.commands.plan.seconds import estimate_step

    job = make_job(config, hardware, world_size)
    check_job(job)
    required = [
        "trained_tokens",
        "step_seconds",
        *(f"{phase}_seconds" for phase in PHASES),
    ]
    steps = []
    for line in read_json_lines(path / "metrics.jsonl", required=required)[
        _WARM_UP_STEPS:
    ]:
        if not is_skipped(line):
            planned = estimate_step(
                replace(job, workload=measured_workload(job.config, line))
            )
            planned["step"] = planned["total"]
            measured = {name: line[f"{name}_seconds"] for name in ("step", *PHASES)}
            for one in (measured, planned):
                one["other"] = max(
                    0.0, one["step"] - sum(one[phase] for phase in PHASES)
                )
                one["rate"] = (
                    line["num_rollouts"] * line["mean_response_tokens"] / one["step"]
                )
            steps.append((measured, planned))
    if not steps:
        raise UserError(
            f"{path}: metrics.jsonl has no step with an update after the first {_WARM_UP_STEPS}"
        )
    return steps


def calibrate(run_dirs: Sequence[Path], base: Hardware) -> str:
    """A file for --hardware: the device's figures, with the factor of each phase with which its
    median step takes what was measured. A phase that no run has keeps its factor. Errors:
    `UserError`, as of `read_run` and `read_steps`.
    """
    steps: Steps = []
    for path in run_dirs:
        config, manifest = read_run(path)
        steps += read_steps(path, config, base, manifest["world_size"])
    names = ", ".join(path.name for path in run_dirs)
    lines = [
        f"# Factors from {names}, by `megatron-opsft plan calibrate`.",
        f"{base.name}:",
    ]
    for name, value in base.model_dump(exclude={"name", "gpus_per_node"}).items():
        phase, seconds = name.removesuffix("_factor"), ""
        both = [(m[phase], p[phase]) for m, p in steps if m.get(phase) and p.get(phase)]
        if both:
            measured, planned = (median(one) for one in zip(*both, strict=True))
            seconds = (
                f"  # measured {measured:.3f} s, planned {planned:.3f} s by {value:.4g}"
            )
            value *= median(measured / planned for measured, planned in both)
        lines.append(f"  {name}: {value!r}{seconds}")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """One run. device: of the plan. steps: how many the medians are over. measured, planned:
    medians of what `Steps` has, the rate of one GPU; and `efficiency`, the rate as a share of the
    first run's.
    """

    nodes: int
    gpus: int
    device: str
    steps: int
    measured: dict[str, float]
    planned: dict[str, float]


def scaling_runs(folder: Path) -> list[Path]:
    """The runs nodes_N in it, by N; none where it is something else that is to be reported."""
    runs = {path.name.removeprefix("nodes_"): path for path in folder.glob("nodes_*")}
    return [
        runs[n]
        for n in sorted(filter(str.isdecimal, runs), key=int)
        if runs[n].is_dir()
    ]


def read_scaling(
    runs: Sequence[Path], gpu: str | None, hardware: Path | None
) -> Contents:
    """Table, charts and page of those runs that can be read. gpu: the device that is planned for;
    None: cpu for runs on CPUs, otherwise h100. hardware: figures, as of `plan calibrate`.

    The error of the contents says which run could not be read. Errors: it, where none could be.
    """
    rows: list[ScalingRow] = []
    told: list[str] = []
    unread: list[UserError] = []
    for run in runs:
        try:
            row = read_row(run, gpu, hardware)
        except UserError as error:
            unread.append(error)
            told.append(f"{run}: not read: {error}")
            continue
        rows.append(row)
        for one, first in (
            (row.measured, rows[0].measured),
            (row.planned, rows[0].planned),
        ):
            one["efficiency"] = one["rate"] / first["rate"]
    failed = None
    if unread:
        failed = UserError(
            f"{len(unread)} of {len(runs)} could not be read: {unread[0]}"
        )
    if failed and not rows:
        raise failed
    table, title = _table(rows), runs[0].resolve().parent.name
    section = _section(rows, table)
    told.append(f"{table.caption}\n\n{aligned(table.headings, table.rows, num_left=0)}")
    return Contents(
        text="\n".join(told),
        write_page=lambda out: write_page(out, [], title=title, sections=[section]),
        sections=[section],
        tables=[table],
        error=failed,
    )


def read_row(run: Path, gpu: str | None, hardware: Path | None) -> ScalingRow:
    """The steps of a run without the first two, whose start is in them; without its efficiency.
    Errors: `UserError`.
    """
    config, manifest = read_run(run)
    gpus, nodes = manifest["world_size"], int(run.name.removeprefix("nodes_"))
    if nodes < 1 or gpus % nodes:
        raise UserError(
            f"{run}: a run of {gpus} ranks was not on {nodes} nodes; rename it"
        )
    torch = str(manifest.get("versions", {}).get("torch"))
    on_cpu = config.run.device == "cpu" or torch.endswith("+cpu")
    name = gpu or ("cpu" if on_cpu else "h100")
    device = load_hardware(name, hardware, gpus_per_node=gpus // nodes)
    both = read_steps(run, config, device, gpus)
    measured, planned = (
        {key: median(one[key] for one in steps) for key in (*_SECONDS, "rate")}
        for steps in zip(*both, strict=True)
    )
    for one in (measured, planned):
        one["rate"] /= gpus
    return ScalingRow(
        nodes=nodes,
        gpus=gpus,
        device=name,
        steps=len(both),
        measured=measured,
        planned=planned,
    )


def _table(rows: Sequence[ScalingRow]) -> Table:
    """A line a run, the plan's figure in brackets."""
    shown = dict.fromkeys(_SECONDS, "{:.2f} ({:.2f})")
    shown |= {"rate": "{:,.1f} ({:,.1f})", "efficiency": "{:.0%} ({:.0%})"}
    devices = ", ".join(dict.fromkeys(row.device for row in rows))
    return Table(
        caption=f"Median seconds of a step, measured (planned for {devices})",
        headings=["nodes", "GPUs", *_SECONDS, "tokens/s/GPU", "efficiency"],
        rows=[
            [str(row.nodes), str(row.gpus)]
            + [
                how.format(row.measured[key], row.planned[key])
                for key, how in shown.items()
            ]
            for row in rows
        ],
        num_left=0,
        note=f"n = {count_of([row.steps for row in rows])} steps a row; medians have no intervals",
    )


def _section(rows: Sequence[ScalingRow], table: Table) -> PageSection:
    """The table; seconds by phase and efficiency over nodes."""
    n = f"{count_of([row.steps for row in rows])} steps a point"

    def curves(
        key: str, measured: str, planned: str = "", place: int = 0
    ) -> Iterator[Series]:
        points = [(row.nodes, row.measured[key]) for row in rows]
        yield Series(label=measured, style_index=place, points=points, n=n)
        points = [(row.nodes, row.planned[key]) for row in rows]
        yield Series(label=planned, style_index=place, points=points, kind="held", n=n)

    names = enumerate(_SECONDS)
    remark = "medians; lines: measured; dots: planned"
    how: dict[str, Any] = {
        "x": "nodes",
        "from_zero": True,
        "log_x": True,
        "remark": remark,
    }
    return PageSection(
        title=table.caption,
        text="Lines: measured; dots: planned. Efficiency: sampled tokens a second and GPU.",
        table=table,
        plots=[
            Chart(
                name="seconds_by_nodes",
                title="Seconds of a step",
                y="seconds of a step",
                series=[one for at, key in names for one in curves(key, key, place=at)],
                **how,
            ),
            Chart(
                name="efficiency_by_nodes",
                title="Efficiency",
                y="efficiency",
                series=[*curves("efficiency", "measured", "planned")],
                show="{:.0%}".format,
                **how,
            ),
        ],
    )
