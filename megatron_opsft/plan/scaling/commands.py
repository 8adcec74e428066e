"""The commands of `tools/scaling.py`: run a sweep, simulate one, collect runs; then tables and a
figure of all points.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from megatron_opsft.command_line import ConfigPath, Overrides
from megatron_opsft.config_file import load_config
from megatron_opsft.errors import UserError
from megatron_opsft.plan.checks import check_job
from megatron_opsft.plan.job import TrainingJob
from megatron_opsft.plan.lengths import (
    DEFAULT_PROMPT_TOKENS,
    DEFAULT_SIGMA,
    PAPER_ACCEPTANCE,
)
from megatron_opsft.plan.measured import read_run
from megatron_opsft.plan.options import (
    Acceptance,
    Gpu,
    GpusPerNode,
    HardwareFile,
    MeanTokens,
    NodeCores,
    PromptTokens,
    ResponseOptions,
    Sigma,
    load_device,
    load_shape,
)
from megatron_opsft.plan.scaling.measure import measured_point, replayed_point, simulated_point
from megatron_opsft.plan.scaling.output import check_output, write_output
from megatron_opsft.plan.scaling.sweep import SweepCase, make_cases, parse_ranks, start_run
from megatron_opsft.plan.traces import read_trace

app = typer.Typer(
    help="Scaling experiments: real runs, simulated steps, tables and figures of both.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Out = Annotated[Path, typer.Option(help="Directory for points.json, points.csv, scaling.md, .svg.")]
Ranks = Annotated[str, typer.Option(help="Numbers of ranks, one for each device: 8,16,32.")]
Vary = Annotated[
    list[str] | None,
    typer.Option(help="KEY=VALUE,VALUE or KEY,KEY=VALUExVALUE,...; several are combined."),
]
ScalingKind = Annotated[
    str,
    typer.Option(help="strong: the same prompts on more ranks; weak: prompts grow; both."),
]
Others = Annotated[
    list[Path] | None, typer.Option("--with", help="points.json to show beside; may be repeated.")
]
Figure = Annotated[str, typer.Option(help="Format of the figure: png or svg.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the points in --out.")]


@app.command()
def simulate(
    config: ConfigPath,
    out: Out,
    ranks: Ranks,
    overrides: Overrides = None,
    vary: Vary = None,
    scaling: ScalingKind = "both",
    gpu: Gpu = "h100",
    hardware: HardwareFile = None,
    gpus_per_node: GpusPerNode = 8,
    node_cores: NodeCores = None,
    lengths: Annotated[
        Path | None,
        typer.Option(
            help="Run directory or JSONL of num_tokens to draw responses from, instead of a mean."
        ),
    ] = None,
    mean_tokens: MeanTokens = None,
    sigma: Sigma = DEFAULT_SIGMA,
    acceptance: Acceptance = PAPER_ACCEPTANCE,
    prompt_tokens: PromptTokens = DEFAULT_PROMPT_TOKENS,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a point, each with a seed.")] = 3,
    others: Others = None,
    figure: Figure = "svg",
    overwrite: Overwrite = False,
) -> None:
    """Simulate a step of every case; cases that the trainer would refuse are named and left out."""
    check_output(out, figure, overwrite)
    responses = ResponseOptions(
        mean_tokens=mean_tokens,
        sigma=sigma,
        acceptance=acceptance,
        prompt_tokens=prompt_tokens,
        trace=None if lengths is None else read_trace(lengths),
    )
    device = load_device(gpu, hardware, gpus_per_node, node_cores)
    points = []
    for case in _cases(config, overrides or [], ranks, vary or [], scaling):
        loaded = load_config(config, [*(overrides or []), *case.overrides])
        shape = load_shape(loaded.model.path)
        job = TrainingJob(config=loaded, shape=shape, hardware=device, world_size=case.ranks)
        try:
            check_job(job)
        except UserError as error:
            typer.echo(f"left out: {case.name}: {error}", err=True)
            continue
        workloads = [responses.workload(job, seed) for seed in range(steps)]
        points.append(simulated_point(job, workloads))
        typer.echo(f"{case.name}: {points[-1].step_seconds:.2f} s a step")
    typer.echo(write_output(points, others or [], out, figure))


@app.command()
def run(
    config: ConfigPath,
    out: Out,
    ranks: Ranks,
    overrides: Overrides = None,
    vary: Vary = None,
    scaling: ScalingKind = "strong",
    others: Others = None,
    figure: Figure = "svg",
    overwrite: Overwrite = False,
) -> None:
    """Train every case on this machine with torchrun, one after the other, and collect the metrics.

    The runs are in OUT/runs. Started again, finished runs stay and others are continued. On a
    cluster start the runs there and `collect` them.
    """
    check_output(out, figure, overwrite)
    points = []
    for case in _cases(config, overrides or [], ranks, vary or [], scaling):
        run_dir = out / "runs" / case.name
        start_run(config, case, run_dir, overrides or [])
        points.append(measured_point(run_dir))
        typer.echo(f"{case.name}: {points[-1].step_seconds:.2f} s a step")
    typer.echo(write_output(points, others or [], out, figure))


@app.command()
def collect(
    run_dirs: Annotated[list[Path], typer.Argument(help="Directories of runs.")],
    out: Out,
    gpu: Annotated[
        str | None, typer.Option(help="Also simulate their very steps on this device.")
    ] = None,
    hardware: HardwareFile = None,
    gpus_per_node: GpusPerNode = 8,
    node_cores: NodeCores = None,
    prompt_tokens: PromptTokens = DEFAULT_PROMPT_TOKENS,
    others: Others = None,
    figure: Figure = "svg",
    overwrite: Overwrite = False,
) -> None:
    """Points of runs that are there, from their metrics.jsonl; medians without the first steps."""
    check_output(out, figure, overwrite)
    points = [measured_point(path) for path in run_dirs]
    if gpu is not None:
        device = load_device(gpu, hardware, gpus_per_node, node_cores)
        for path in run_dirs:
            measured = read_run(
                path, load_shape, device, prompt_tokens=prompt_tokens, sigma=DEFAULT_SIGMA
            )
            points.append(replayed_point(measured))
    typer.echo(write_output(points, others or [], out, figure))


def _cases(
    config: Path, overrides: Sequence[str], ranks: str, vary: Sequence[str], scaling: str
) -> list[SweepCase]:
    if scaling not in ("strong", "weak", "both"):
        raise UserError(f"--scaling={scaling} must be strong, weak or both")
    prompts = load_config(config, list(overrides)).data.prompts_per_step
    return list(make_cases(parse_ranks(ranks), vary, prompts, scaling))  # type: ignore[arg-type]
