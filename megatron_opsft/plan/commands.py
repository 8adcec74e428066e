"""`megatron-opsft plan`: the commands, as users call them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_opsft.command_line import ConfigPath, Overrides, RunByDefault, examples
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
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
PromptTokens = Annotated[int, typer.Option(min=1, help="Mean tokens of a prompt.")]
Sigma = Annotated[
    float, typer.Option(min=0, help="Standard deviation of the logarithm of the lengths.")
]


@app.command(
    name="run",
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
    mean_tokens: Annotated[
        float, typer.Option(min=1, help="Mean response before the limit cuts it; the paper's end.")
    ] = PAPER_MEAN_TOKENS,
    sigma: Sigma = DEFAULT_SIGMA,
    acceptance: Annotated[
        float, typer.Option(min=0, max=1, help="Share of responses trained on.")
    ] = PAPER_ACCEPTANCE,
    prompt_tokens: PromptTokens = DEFAULT_PROMPT_TOKENS,
    search: Annotated[
        bool, typer.Option("--search", help="Look for the fastest layout that fits.")
    ] = False,
    top: Annotated[int, typer.Option(min=1, help="Layouts that --search shows.")] = 5,
    as_json: Json = False,
) -> None:
    """Check a run end to end without a device, and say whether it fits and what it costs.

    Needs nothing of the model but config.json. Exit code 0: it fits; 1: it does not; 2: bad input.
    """
    asked = _Asked(
        mean_tokens=mean_tokens, sigma=sigma, acceptance=acceptance, prompt_tokens=prompt_tokens
    )
    from megatron_opsft.config_file import load_config

    loaded = load_config(config, overrides or [])
    figures = load_device(gpu, hardware, gpus_per_node, node_cores)
    world_size = nodes * gpus_per_node
    num_steps = steps or loaded.run.steps
    if num_steps < 1:
        raise UserError("run.steps=0 costs nothing; give --steps")
    shape = load_shape(loaded.model.path)
    if search:
        raise typer.Exit(
            _search(loaded, shape, figures, world_size, asked, num_steps, top, as_json)
        )
    from megatron_opsft.plan.checks import check_job, notes_of
    from megatron_opsft.plan.ranks import build_stages
    from megatron_opsft.plan.verdict import as_json as plan_as_json
    from megatron_opsft.plan.verdict import host_notes, make_plan

    job = check_job(loaded, shape, figures, world_size)
    plan = make_plan(job, build_stages(job), asked.workload(job), num_steps)
    notes = notes_of(job) + host_notes(plan)
    if as_json:
        typer.echo(json.dumps(plan_as_json(plan) | {"notes": notes}))
    else:
        from megatron_opsft.plan.tables import show_plan

        _print(show_plan(plan, notes))
    raise typer.Exit(0 if plan.fits else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The responses that the options describe."""

    mean_tokens: float
    sigma: float
    acceptance: float
    prompt_tokens: int

    def workload(self, job: Any) -> Any:
        """Of one step of a job."""
        from megatron_opsft.plan.lengths import make_workload

        return make_workload(
            job.num_responses,
            mean_tokens=self.mean_tokens,
            sigma=self.sigma,
            limit=job.config.rollout.max_response_tokens,
            acceptance=self.acceptance,
            prompt_tokens=min(self.prompt_tokens, job.config.data.max_prompt_tokens),
        )


def _search(
    config: Any,
    shape: Any,
    hardware: Any,
    world_size: int,
    asked: _Asked,
    num_steps: int,
    top: int,
    as_json: bool,
) -> int:
    """Prints the layouts; the exit code."""
    from megatron_opsft.plan.ranks import build_stages
    from megatron_opsft.plan.search import found_as_json, search_layouts
    from megatron_opsft.plan.tables import show_found
    from megatron_opsft.plan.verdict import make_plan

    found = search_layouts(config, shape, hardware, world_size, asked.workload, num_steps)
    shown = found[:top]
    # The search counts parameters; of the best one Megatron's own model is built.
    exact = None
    if shown and shown[0].plan.is_safe:
        job = shown[0].plan.job
        exact = make_plan(job, build_stages(job), asked.workload(job), num_steps)
    if as_json:
        typer.echo(json.dumps(found_as_json(shown, exact)))
    else:
        _print(show_found(shown, exact, len(found)))
    return 0 if exact is not None and exact.fits else 1


def _print(what: Any) -> None:
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
