"""The commands of `tools/scaling.py`: run a sweep, simulate one, collect runs; then tables and a
figure of all points.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_opsft.command_line import ConfigPath, Overrides
from megatron_opsft.errors import UserError
from megatron_opsft.plan.lengths import (
    DEFAULT_PROMPT_TOKENS,
    DEFAULT_SIGMA,
    PAPER_ACCEPTANCE,
    PAPER_MEAN_TOKENS,
)
from megatron_opsft.plan.options import (
    GpusPerNode,
    HardwareFile,
    NodeCores,
    load_device,
    load_shape,
)
from megatron_opsft.plan.scaling.output import check_output, write_output

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
PromptTokens = Annotated[
    int, typer.Option(min=1, help="Mean tokens of a prompt, where traces do not say.")
]


@app.command()
def simulate(
    config: ConfigPath,
    out: Out,
    ranks: Ranks,
    overrides: Overrides = None,
    vary: Vary = None,
    scaling: ScalingKind = "both",
    gpu: Annotated[str, typer.Option(help="Device, as for `plan`.")] = "h100",
    hardware: HardwareFile = None,
    gpus_per_node: GpusPerNode = 8,
    node_cores: NodeCores = None,
    lengths: Annotated[
        Path | None,
        typer.Option(help="Run directory or JSONL of num_tokens to draw responses from."),
    ] = None,
    mean_tokens: Annotated[
        float, typer.Option(min=1, help="Without --lengths: mean before the limit cuts it.")
    ] = PAPER_MEAN_TOKENS,
    sigma: Annotated[
        float, typer.Option(min=0, help="Without --lengths: spread of the log-normal.")
    ] = DEFAULT_SIGMA,
    acceptance: Annotated[
        float, typer.Option(min=0, max=1, help="Without --lengths: share trained on.")
    ] = PAPER_ACCEPTANCE,
    prompt_tokens: PromptTokens = DEFAULT_PROMPT_TOKENS,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a point, each with a seed.")] = 3,
    others: Others = None,
    figure: Figure = "svg",
    overwrite: Overwrite = False,
) -> None:
    """Simulate a step of every case; cases that the trainer would refuse are named and left out."""
    check_output(out, figure, overwrite)
    from megatron_opsft.plan.checks import check_job
    from megatron_opsft.plan.scaling.simulated import simulate_point

    draw = _Draw(
        trace=_read_trace(lengths),
        mean_tokens=mean_tokens,
        sigma=sigma,
        acceptance=acceptance,
        prompt_tokens=prompt_tokens,
    )
    from megatron_opsft.config_file import load_config

    device = load_device(gpu, hardware, gpus_per_node, node_cores)
    points = []
    for case in _cases(config, overrides or [], ranks, vary or [], scaling):
        loaded = load_config(config, [*(overrides or []), *case.overrides])
        shape = load_shape(loaded.model.path)
        try:
            job = check_job(loaded, shape, device, case.ranks)
        except UserError as error:
            typer.echo(f"left out: {case.name}: {error}", err=True)
            continue
        points.append(simulate_point(job, lambda seed, job=job: draw(job, seed), steps))  # type: ignore[misc]
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

    The runs are in OUT/runs. Started again, finished runs stay and others are gone on with. On a
    cluster start the runs there and `collect` them.
    """
    check_output(out, figure, overwrite)
    from megatron_opsft.plan.scaling.collect import measured_point
    from megatron_opsft.plan.scaling.runs import start_run

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
    from megatron_opsft.plan.scaling.collect import measured_point

    points = [measured_point(path) for path in run_dirs]
    if gpu is not None:
        from megatron_opsft.plan.measured import read_run
        from megatron_opsft.plan.scaling.simulated import replay_point

        device = load_device(gpu, hardware, gpus_per_node, node_cores)
        for path in run_dirs:
            measured = read_run(
                path, load_shape, device, prompt_tokens=prompt_tokens, sigma=DEFAULT_SIGMA
            )
            points.append(replay_point(measured))
    typer.echo(write_output(points, others or [], out, figure))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draw:
    """The responses of a step, by seed."""

    trace: Any
    mean_tokens: float
    sigma: float
    acceptance: float
    prompt_tokens: int

    def __call__(self, job: Any, seed: int) -> Any:
        from megatron_opsft.plan.lengths import draw_workload
        from megatron_opsft.plan.traces import draw_from_trace

        limit = job.config.rollout.max_response_tokens
        prompt_tokens = min(self.prompt_tokens, job.config.data.max_prompt_tokens)
        if self.trace is not None:
            return draw_from_trace(
                self.trace,
                num_prompts=job.config.data.prompts_per_step,
                group_size=job.config.rollout.group_size,
                limit=limit,
                prompt_tokens=prompt_tokens,
                seed=seed,
            )
        return draw_workload(
            job.num_responses,
            mean_tokens=self.mean_tokens,
            sigma=self.sigma,
            limit=limit,
            acceptance=self.acceptance,
            prompt_tokens=prompt_tokens,
            seed=seed,
        )


def _read_trace(path: Path | None) -> Any:
    from megatron_opsft.plan.traces import read_trace

    return None if path is None else read_trace(path)


def _cases(
    config: Path, overrides: Sequence[str], ranks: str, vary: Sequence[str], scaling: str
) -> list[Any]:
    from megatron_opsft.config_file import load_config
    from megatron_opsft.plan.scaling.sweep import make_cases, parse_ranks

    if scaling not in ("strong", "weak", "both"):
        raise UserError(f"--scaling={scaling} must be strong, weak or both")
    prompts = load_config(config, list(overrides)).data.prompts_per_step
    return list(make_cases(parse_ranks(ranks), vary, prompts, scaling))  # type: ignore[arg-type]
