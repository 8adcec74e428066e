"""`megatron-opsft plan`: the commands, as users call them."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_opsft.command_line import (
    ConfigPath,
    Overrides,
    RunByDefault,
    RunCommand,
    examples,
)
from megatron_opsft.errors import ANSWER_IS_NO, UserError
from megatron_opsft.plan.lengths import (
    DEFAULT_PROMPT_TOKENS,
    DEFAULT_SIGMA,
    PAPER_ACCEPTANCE,
)
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

if TYPE_CHECKING:
    from rich.console import RenderableType

    from megatron_opsft.plan.job import TrainingJob
    from megatron_opsft.plan.lengths import Workload

app = typer.Typer(
    cls=RunByDefault,
    help="What a run needs and costs, before it is paid for. `plan CONFIG` is `plan run CONFIG`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog=examples(
        "megatron-opsft plan examples/configs/r1_distill_7b_paper.yaml --nodes 2",
        "megatron-opsft plan calibrate runs/a runs/b --out figures.yaml",
    ),
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command(
    name="run",
    cls=RunCommand,
    epilog=examples(
        "megatron-opsft plan examples/configs/r1_distill_7b_paper.yaml --nodes 2",
        "megatron-opsft plan CONFIG rollout.engine=vllm --gpu a100 --search",
    ),
)
def run(
    config: ConfigPath,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.")] = 1,
    gpus_per_node: GpusPerNode = 8,
    gpu: Gpu = "h100",
    hardware: HardwareFile = None,
    node_cores: NodeCores = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps to cost; by default run.steps.")
    ] = None,
    mean_tokens: MeanTokens = None,
    sigma: Sigma = DEFAULT_SIGMA,
    acceptance: Acceptance = PAPER_ACCEPTANCE,
    prompt_tokens: PromptTokens = DEFAULT_PROMPT_TOKENS,
    search: Annotated[
        bool, typer.Option("--search", help="Look for the fastest layout that fits.")
    ] = False,
    top: Annotated[int, typer.Option(min=1, help="Layouts that --search shows.")] = 5,
    as_json: Json = False,
) -> None:
    """Check a run end to end without a device, and say whether it fits and what it costs.

    Needs nothing of the model but config.json. Exit code 0: it fits; 4: it does not; 2: bad input.
    """
    from megatron_opsft.config_file import load_config
    from megatron_opsft.rollout.limits import fit_lengths

    loaded = load_config(config, overrides or [])
    shape = load_shape(loaded.model.path)
    device = load_device(gpu, hardware, gpus_per_node, node_cores)
    from megatron_opsft.plan.job import TrainingJob

    job = TrainingJob(
        config=fit_lengths(loaded, shape.max_position_embeddings),
        shape=shape,
        hardware=device,
        world_size=nodes * gpus_per_node,
    )
    num_steps = steps or loaded.run.steps
    if num_steps < 1:
        raise UserError("run.steps=0 costs nothing; give --steps")
    workload = ResponseOptions(
        mean_tokens=mean_tokens,
        sigma=sigma,
        acceptance=acceptance,
        prompt_tokens=prompt_tokens,
    ).workload(job)
    if search:
        raise typer.Exit(_search(job, workload, num_steps, top, as_json))
    raise typer.Exit(_plan(job, workload, num_steps, as_json))


def _plan(job: "TrainingJob", workload: "Workload", num_steps: int, as_json: bool) -> int:
    """Prints what the run takes; the exit code."""
    from megatron_opsft.plan.checks import check_job, notes_of
    from megatron_opsft.plan.estimate import estimate_run, host_notes, run_as_json
    from megatron_opsft.plan.ranks import build_stages
    from megatron_opsft.plan.tables import show_run

    check_job(job)
    estimate = estimate_run(job, build_stages(job), workload, num_steps)
    notes = notes_of(job) + host_notes(estimate)
    if as_json:
        typer.echo(json.dumps(run_as_json(estimate) | {"notes": notes}))
    else:
        _print(show_run(estimate, notes))
    return 0 if estimate.fits else ANSWER_IS_NO


def _search(
    job: "TrainingJob", workload: "Workload", num_steps: int, top: int, as_json: bool
) -> int:
    """Prints the layouts; the exit code."""
    from megatron_opsft.plan.estimate import estimate_run
    from megatron_opsft.plan.ranks import build_stages
    from megatron_opsft.plan.search import found_as_json, search_layouts
    from megatron_opsft.plan.tables import show_found

    found = search_layouts(job, workload, num_steps)
    shown = found[:top]
    # The search counts parameters; of the best one Megatron's own model is built.
    exact = None
    if shown and shown[0].estimate.is_safe:
        best = shown[0].estimate.job
        exact = estimate_run(best, build_stages(best), workload, num_steps)
    if as_json:
        typer.echo(json.dumps(found_as_json(shown, exact)))
    else:
        _print(show_found(shown, exact, len(found)))
    return 0 if exact is not None and exact.fits else ANSWER_IS_NO


def _print(what: "RenderableType") -> None:
    from rich.console import Console

    console = Console()
    # A file or pipe has no width of its own: no line is to be cut there.
    Console(width=None if console.is_terminal else 160).print(what, soft_wrap=False)


@app.command(
    epilog=examples(
        "megatron-opsft plan calibrate runs/a runs/b --out figures.yaml",
        "megatron-opsft plan CONFIG --hardware figures.yaml --gpu h100",
    )
)
def calibrate(
    run_dirs: Annotated[
        list[Path], typer.Argument(help="Directories of runs on one kind of device.")
    ],
    out: Annotated[Path, typer.Option(help="File of figures to write, for --hardware.")],
    gpu: Gpu = "h100",
    hardware: HardwareFile = None,
    gpus_per_node: GpusPerNode = 8,
    node_cores: NodeCores = None,
    prompt_tokens: PromptTokens = DEFAULT_PROMPT_TOKENS,
    sigma: Sigma = DEFAULT_SIGMA,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what is at --out.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Fit a device's achieved fractions and overheads to what runs measured (metrics.jsonl).

    Peaks, sizes and prices stay as they are for --gpu. Exit code 2: bad input.
    """
    from megatron_opsft.plan.calibrate import calibrate as fit
    from megatron_opsft.plan.calibrate import write_hardware
    from megatron_opsft.plan.measured import read_run

    if out.exists() and not overwrite:
        raise UserError(f"--out={out} exists; name another file or give --overwrite")
    base = load_device(gpu, hardware, gpus_per_node, node_cores)
    runs = [
        read_run(path, load_shape, base, prompt_tokens=prompt_tokens, sigma=sigma)
        for path in run_dirs
    ]
    result = fit(runs, base)
    write_hardware(out, result.hardware, run_dirs, base_file=hardware)
    if as_json:
        typer.echo(json.dumps(result.as_json()))
    else:
        from megatron_opsft.plan.tables import show_calibration

        _print(show_calibration(result))
        typer.echo(f"wrote {out}; use it with --hardware {out} --gpu {gpu}")
