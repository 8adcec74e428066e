"""The same run on 1, 2, 4, ... nodes: what a step took, and what the plan says of it.

`slurm/scaling.sh` makes the runs, in folders nodes_1, nodes_2, ... beside each other.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from megatron_opsft.config import Config
from megatron_opsft.errors import UserError
from megatron_opsft.plan.hardware import PHASES, load_hardware
from megatron_opsft.plan.workload import DEFAULT_PROMPT_TOKENS, DEFAULT_SIGMA
from megatron_opsft.report.page.plot import Series, plot
from megatron_opsft.report.page.tables import Section, Table
from megatron_opsft.report.page.write import write_page
from megatron_opsft.report.runs import change_of

if TYPE_CHECKING:
    from megatron_opsft.plan.estimate import StepEstimate

_NAME = re.compile(r"nodes_(\d+)")
_SHOWN = ("step", *PHASES, "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """One run. device: of the plan. measured, planned: medians over its steps, of the whole `step`
    and of each phase in seconds, and of `rate`: sampled tokens a second and GPU.
    """

    nodes: int
    gpus: int
    device: str
    measured: dict[str, float]
    planned: dict[str, float]


def scaling_runs(paths: Sequence[Path]) -> list[Path]:
    """The runs nodes_N in the one folder, or given as several paths; none where it is something
    else that is to be reported.
    """
    runs = list(paths)
    if len(paths) == 1:
        runs = [path for path in paths[0].glob("nodes_*") if path.is_dir()]
        runs = [path for path in runs if _NAME.fullmatch(path.name)]
    counts = {int(match[1]) for path in runs if (match := _NAME.fullmatch(path.name))}
    return sorted(runs, key=_nodes) if runs and len(counts) == len(runs) else []


def _nodes(run: Path) -> int:
    return int(run.name.removeprefix("nodes_"))


def report_scaling(
    runs: Sequence[Path],
    page: Path,
    gpu: str | None,
    hardware: Path | None,
    say: Callable[[str], object],
) -> None:
    """Print the table of those that can be read, and write their page. gpu: the device that is
    planned for; None: cpu for runs on CPUs, otherwise h100. hardware: figures, as of `plan
    calibrate`.

    Errors: `UserError` at the end where a run could not be read.
    """
    rows, unread = [], []
    for run in runs:
        try:
            rows.append(read_row(run, gpu, hardware))
        except UserError as error:
            unread.append(error)
            say(f"{run}: not read: {error}")
    if rows:
        say(scaling_table(rows))
        first, last = rows[0], rows[-1]
        nodes = f"{first.nodes} to {last.nodes} nodes"
        seconds = first.measured["step"], last.measured["step"]
        efficiency = efficiencies(last, first)[0]
        figures = [
            change_of(f"Seconds of a step, {nodes}", *seconds, is_share=False),
            change_of(f"Efficiency, {nodes}", 1.0, efficiency, is_share=True),
        ]
        title = runs[0].resolve().parent.name
        write_page(page, [], title=title, figures=figures, sections=[_section(rows)])
        say(f"page: {page}")
    if unread:
        raise UserError(f"{len(unread)} of {len(runs)} could not be read: {unread[0]}")


def read_row(run: Path, gpu: str | None, hardware: Path | None) -> ScalingRow:
    """The steps of a run without the first two, whose start is in them. Errors: `UserError`."""
    from megatron_opsft.plan.calibrate import plan_steps, read_run  # heavy
    from megatron_opsft.plan.job import make_job

    config, manifest = read_run(run)
    gpus, nodes = manifest["world_size"], _nodes(run)
    if nodes < 1 or gpus % nodes:
        raise UserError(f"{run}: a run of {gpus} ranks was not on {nodes} nodes; rename it")
    device = load_hardware(
        gpu or ("cpu" if _is_on_cpu(config, manifest) else "h100"),
        hardware,
        gpus_per_node=gpus // nodes,
    )
    prompt_tokens = min(DEFAULT_PROMPT_TOKENS, config.data.max_prompt_tokens)
    job = make_job(config, device, gpus)
    steps = plan_steps(run, job, prompt_tokens=prompt_tokens, sigma=DEFAULT_SIGMA)
    both = [_both(line, estimate, gpus) for line, estimate in steps]
    measured, planned = (
        {name: median(one[place][name] for one in both) for name in both[0][place]}
        for place in (0, 1)
    )
    return ScalingRow(
        nodes=nodes, gpus=gpus, device=device.name, measured=measured, planned=planned
    )


def _is_on_cpu(config: Config, manifest: dict[str, Any]) -> bool:
    torch = str(manifest.get("versions", {}).get("torch"))
    return config.run.device == "cpu" or torch.endswith("+cpu")


def _both(
    line: dict[str, Any], estimate: "StepEstimate", gpus: int
) -> tuple[dict[str, float], dict[str, float]]:
    """(measured, planned) of one step."""
    tokens = line["num_rollouts"] * line["mean_response_tokens"]
    phases = (
        {"step": line["step_seconds"], **{p: line[f"{p}_seconds"] for p in PHASES}},
        {"step": estimate.total, **{p: getattr(estimate, p) for p in PHASES}},
    )
    for one in phases:
        one["other"] = max(0.0, one["step"] - sum(one[phase] for phase in PHASES))
        one["rate"] = tokens / one["step"] / gpus
    return phases


def scaling_table(rows: Sequence[ScalingRow]) -> str:
    """For a terminal: a line a run."""
    from tabulate import tabulate

    table = _table(rows)
    align = ["right"] * len(table.headings)
    lines = tabulate(
        table.rows, table.headings, tablefmt="simple", disable_numparse=True, colalign=align
    )
    return f"{table.caption}\n\n{lines}"


def _table(rows: Sequence[ScalingRow]) -> Table:
    """A line a run, the plan's figure in brackets; efficiency: tokens a second and GPU against the
    run on the fewest nodes.
    """
    devices = ", ".join(dict.fromkeys(row.device for row in rows))
    return Table(
        caption=f"median seconds of a step, measured (planned for {devices})",
        headings=["nodes", "GPUs", *_SHOWN, "tokens/s/GPU", "efficiency"],
        rows=[
            [
                str(row.nodes),
                str(row.gpus),
                *(f"{row.measured[name]:.2f} ({row.planned[name]:.2f})" for name in _SHOWN),
                f"{row.measured['rate']:,.1f} ({row.planned['rate']:,.1f})",
                "{:.0%} ({:.0%})".format(*efficiencies(row, rows[0])),
            ]
            for row in rows
        ],
    )


def efficiencies(row: ScalingRow, first: ScalingRow) -> tuple[float, float]:
    """(measured, planned), of 1."""
    pairs = ((row.measured, first.measured), (row.planned, first.planned))
    measured, planned = (one["rate"] / base["rate"] for one, base in pairs)
    return measured, planned


def _section(rows: Sequence[ScalingRow]) -> Section:
    """The table, and seconds by phase and efficiency over nodes."""
    seconds: list[Series] = []
    for place, name in enumerate(_SHOWN):
        for kind, of in (("curve", "measured"), ("held", "planned")):
            points = [(row.nodes, getattr(row, of)[name]) for row in rows]
            label = name if kind == "curve" else ""
            seconds.append(Series(label=label, place=place, points=points, kind=kind))
    both = [(row.nodes, *efficiencies(row, rows[0])) for row in rows]
    share = [
        Series(label="measured", place=0, points=[(n, one) for n, one, _ in both]),
        Series(label="planned", place=0, points=[(n, one) for n, _, one in both], kind="held"),
    ]
    table = _table(rows)
    return Section(
        title=table.caption.capitalize(),
        text="Lines: measured; dots: planned. Efficiency: sampled tokens a second and GPU.",
        table=table,
        plots=[
            plot("Seconds of a step", seconds, x="nodes", from_zero=True, log_x=True),
            plot("Efficiency", share, x="nodes", show="{:.0%}".format, from_zero=True, log_x=True),
        ],
    )
