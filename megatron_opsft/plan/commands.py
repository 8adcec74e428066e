"""`megatron-opsft plan`: the commands, as users call them."""

import json
from dataclasses import asdict
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
from megatron_opsft.plan.workload import DEFAULT_PROMPT_TOKENS, DEFAULT_SIGMA, PAPER_ACCEPTANCE

if TYPE_CHECKING:
    from rich.console import RenderableType

    from megatron_opsft.plan.job import TrainingJob
    from megatron_opsft.plan.workload import Workload

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

Gpu = Annotated[
    str, typer.Option(help="Device: h100, h200, a100, b200, cpu, or one of --hardware.")
]
GpusPerNode = Annotated[int, typer.Option(min=1, help="Devices, and ranks, of a node.")]
HardwareFile = Annotated[
    Path | None, typer.Option(help="Figures of devices, such as `plan calibrate` writes.")
]
Sigma = Annotated[float, typer.Option(min=0, help="Spread of log lengths.")]
PromptTokens = Annotated[int, typer.Option(min=1, help="Mean tokens of a prompt.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command(
    name="run",
    cls=RunCommand,
    epilog=examples(
        "megatron-opsft plan examples/configs/r1_distill_7b_paper.yaml --nodes 2",
        "megatron-opsft plan CONFIG --nodes 1,8,64",
        "megatron-opsft plan CONFIG rollout.engine=vllm --gpu a100 --search",
    ),
)
def run(
    config: ConfigPath,
    overrides: Overrides = None,
    nodes: Annotated[
        str, typer.Option(help="Nodes; several, such as 1,8,64, give a row each.")
    ] = "1",
    gpus_per_node: GpusPerNode = 8,
    gpu: Gpu = "h100",
    hardware: HardwareFile = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps to cost; by default run.steps.")
    ] = None,
    mean_tokens: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Mean response before the limit cuts it; by default the paper's end, 2186, or "
            "62 % of a limit below the paper's.",
        ),
    ] = None,
    sigma: Sigma = DEFAULT_SIGMA,
    acceptance: Annotated[
        float, typer.Option(min=0, max=1, help="Share of correct, finished responses.")
    ] = PAPER_ACCEPTANCE,
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

    counts = _parse_nodes(nodes, search)
    loaded = load_config(config, overrides or [])
    num_steps = steps or loaded.run.steps
    if num_steps < 1:
        raise UserError("run.steps=0 costs nothing; give --steps")
    from megatron_opsft.plan.hardware import load_hardware
    from megatron_opsft.plan.job import make_job
    from megatron_opsft.plan.workload import make_workload

    device = load_hardware(gpu, hardware, gpus_per_node=gpus_per_node)
    jobs = [make_job(loaded, device, count * gpus_per_node) for count in counts]
    workload = make_workload(
        jobs[0].config,
        mean_tokens=mean_tokens,
        sigma=sigma,
        acceptance=acceptance,
        prompt_tokens=prompt_tokens,
    )
    if search:
        raise typer.Exit(_search(jobs[0], workload, num_steps, top, as_json))
    raise typer.Exit(_plan(jobs, workload, num_steps, as_json))


def _parse_nodes(text: str, search: bool) -> list[int]:
    """ "1,8" as numbers. Errors: `UserError`, also for several where a search takes one."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise UserError(f"--nodes={text} must be a number of nodes, or several such as 1,8,64")
    if search and len(counts) > 1:
        raise UserError(f"--nodes={text} and --search exclude each other; give one number")
    return counts


def _plan(jobs: "list[TrainingJob]", workload: "Workload", num_steps: int, as_json: bool) -> int:
    """Prints what the run takes on each number of devices; the exit code."""
    from megatron_opsft.plan.checks import check_job, notes_of
    from megatron_opsft.plan.estimate import estimate_run, run_as_json
    from megatron_opsft.plan.tables import show_nodes, show_run

    for job in jobs:
        check_job(job)
    runs = [estimate_run(job, workload, num_steps) for job in jobs]
    found = [run_as_json(one) | {"notes": notes_of(one)} for one in runs]
    if as_json:
        typer.echo(json.dumps(found[0] if len(found) == 1 else {"runs": found}))
    elif len(runs) == 1:
        _print(show_run(runs[0], notes_of(runs[0])))
    else:
        _print(show_nodes(runs))
    return 0 if all(one.fits for one in runs) else ANSWER_IS_NO


def _search(
    job: "TrainingJob", workload: "Workload", num_steps: int, top: int, as_json: bool
) -> int:
    """Prints the layouts; the exit code."""
    from megatron_opsft.plan.search import found_as_json, search_layouts
    from megatron_opsft.plan.tables import show_found

    found = search_layouts(job, workload, num_steps)
    if as_json:
        typer.echo(json.dumps(found_as_json(found[:top])))
    else:
        _print(show_found(found[:top], len(found)))
    return 0 if found[0].estimate.is_safe else ANSWER_IS_NO


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
    prompt_tokens: PromptTokens = DEFAULT_PROMPT_TOKENS,
    sigma: Sigma = DEFAULT_SIGMA,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what is at --out.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Set the factor of each phase to what runs measured (metrics.jsonl).

    Peaks, sizes and prices stay as they are for --gpu. Exit code 2: bad input.
    """
    from megatron_opsft.plan.calibrate import calibrate as fit
    from megatron_opsft.plan.calibrate import read_steps, write_hardware
    from megatron_opsft.plan.hardware import load_hardware

    if out.exists() and not overwrite:
        raise UserError(f"--out={out} exists; name another file or give --overwrite")
    base = load_hardware(gpu, hardware, gpus_per_node=gpus_per_node)
    steps = [
        step
        for path in run_dirs
        for step in read_steps(path, base, prompt_tokens=prompt_tokens, sigma=sigma)
    ]
    fitted = fit(steps, base)
    write_hardware(out, base, fitted, run_dirs)
    if as_json:
        phases = {phase: asdict(one) for phase, one in fitted.items()}
        typer.echo(json.dumps({"device": gpu, "phases": phases}))
        return
    for phase, one in fitted.items():
        typer.echo(
            f"{phase}: measured {one.measured:.3f} s, planned {one.planned:.3f} s; "
            f"{phase}_factor {getattr(base, f'{phase}_factor'):.4g} -> {one.factor:.4g}"
        )
    typer.echo(f"wrote {out}; use it with --hardware {out} --gpu {gpu}")
