"""`megatron-opsft launch`: the commands, as users call them."""

from pathlib import Path
from typing import Annotated

import typer

from megatron_opsft.command_line import (
    ConfigPath,
    Overrides,
    Overwrite,
    Resume,
    ResumeMode,
    RunCommand,
    check_start,
    examples,
)
from megatron_opsft.config import ParallelConfig
from megatron_opsft.config_file import load_config
from megatron_opsft.config_yaml import find_yaml
from megatron_opsft.errors import UserError
from megatron_opsft.preflight.check import check_run
from megatron_opsft.runtime.world_size import check_world

app = typer.Typer(
    help="Start a run: with torchrun on this machine, or as a SLURM job.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog=examples(
        "megatron-opsft launch local examples/configs/quickstart.yaml --ranks 2",
        "megatron-opsft launch slurm CONFIG --nodes 4 --dry-run",
    ),
)


@app.command(
    cls=RunCommand,
    epilog=examples(
        "megatron-opsft launch local examples/configs/quickstart.yaml --ranks 2",
        "megatron-opsft launch local CONFIG parallel.tp=4 --ranks 8 --resume",
    ),
)
def local(
    config: ConfigPath,
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option(min=1, help="Processes; one for each GPU.")] = 1,
    max_restarts: Annotated[
        int,
        typer.Option(min=0, help="After a failure continue from the newest checkpoint so often."),
    ] = 3,
    resume: Resume = None,
    overwrite: Overwrite = False,
) -> None:
    """Train on this machine, with restarts. Exit codes are those of `megatron-opsft train`."""
    check_start(resume=resume, overwrite=overwrite)
    loaded = load_config(config, overrides or [])
    _check_world_size(ranks, loaded.parallel, "--ranks")
    check_run(
        loaded,
        resume=resume is not None,
        overwrite=overwrite,
        must_exist=resume is ResumeMode.YES,
        world_size=ranks,
    )
    from megatron_opsft.launch.restarts import run_with_restarts
    from megatron_opsft.launch.torchrun import Torchrun

    command = ["train", str(config), *(overrides or [])]
    first = ["--overwrite"] if overwrite else [f"--resume={resume}"] if resume else []
    manifest = loaded.run.dir / "manifest.json"
    replaced = _stamp(manifest) if overwrite else None

    def start(again: bool) -> int:
        # The run that is to be replaced must not be resumed, if the first start died before that.
        fresh = not again or (replaced is not None and _stamp(manifest) == replaced)
        return torchrun.run([*command, *(first if fresh else ["--resume=auto"])])

    with Torchrun(ranks) as torchrun:
        code = run_with_restarts(start, max_restarts)
    raise typer.Exit(code)


@app.command(
    epilog=examples(
        "megatron-opsft launch rounds CONFIG --rounds 7 --problems 3200 --ranks 8",
        "megatron-opsft launch rounds CONFIG method.name=crst --rounds 1",
    ),
)
def rounds(
    config: ConfigPath,
    overrides: Overrides = None,
    rounds: Annotated[int, typer.Option(min=1, help="Data are made and trained on so often.")] = 7,
    problems: Annotated[
        int | None,
        typer.Option(min=1, help="Of each round; by default all of them.", show_default=False),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Processes; one for each GPU.")] = 1,
) -> None:
    """Make a method's fixed data and train on them, round after round, on this machine.

    Given again, it continues where it was. The last round's model is run.dir/round_N/hf.
    """
    from megatron_opsft.launch.rounds import Rounds, check_rounds, run_rounds

    loaded = load_config(config, overrides or [])
    _check_world_size(ranks, loaded.parallel, "--ranks")
    check_rounds(loaded)
    from megatron_opsft.launch.torchrun import Torchrun

    words = [str(config), *(overrides or [])]
    wanted = Rounds(config=loaded, words=words, count=rounds, problems=problems)
    with Torchrun(ranks) as torchrun:
        code = run_rounds(wanted, torchrun.run)
    raise typer.Exit(code)


def _stamp(path: Path) -> tuple[int, int] | None:
    """Tells a file from one that has replaced it; None where there is none."""
    if not path.is_file():
        return None
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


@app.command(
    epilog=examples(
        "megatron-opsft launch slurm CONFIG run.dir=runs/a --nodes 4 --partition gpu",
        "megatron-opsft launch slurm CONFIG OTHER --sbatch=--qos=high --dry-run",
    )
)
def slurm(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG... [OVERRIDES]...",
            help="YAML file of a run, or several for an array of jobs; then section.key=value.",
        ),
    ],
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of a job.")] = 1,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="One for each GPU.")] = 8,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=0, help="By default one for each rank; 0: none.")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="By default SLURM's.")] = None,
    account: Annotated[str | None, typer.Option(help="By default yours.")] = None,
    time: Annotated[str | None, typer.Option(help="Limit; by default 24:00:00.")] = None,
    job_name: Annotated[str | None, typer.Option(help="By default from run.dir.")] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(help="Another option of sbatch, such as --sbatch=--qos=high; repeatable."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command line instead of running it.")
    ] = False,
) -> None:
    """Submit slurm/train_7b.sh for these configurations, with these resources.

    Settings of the site are environment variables, as for the script itself (slurm/common.sh).
    """
    from megatron_opsft.launch.slurm import Resources, batch_job, submit

    configs = [find_yaml(Path(word)) for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    if not configs:
        raise UserError("launch slurm: name a YAML file, such as examples/configs/*.yaml")
    loaded = {path: load_config(path, overrides) for path in configs}
    for path, config in loaded.items():
        _check_world_size(nodes * ranks_per_node, config.parallel, f"{path} with --nodes")
    gpus = ranks_per_node if gpus_per_node is None else gpus_per_node
    job = batch_job(
        {path: config.run.dir for path, config in loaded.items()},
        overrides,
        Resources(
            nodes=nodes,
            ranks_per_node=ranks_per_node,
            gpus_per_node=gpus,
            partition=partition,
            account=account,
            time=time,
            job_name=job_name,
            more=tuple(sbatch or ()),
        ),
    )
    typer.echo(job.command_line() if dry_run else submit(job))


def _check_world_size(world_size: int, parallel: ParallelConfig, option: str) -> None:
    if world_size % parallel.replica_size:
        raise UserError(
            f"{option}: {world_size} ranks are not a multiple of {parallel.replica}; "
            "change one of them"
        )
    check_world(world_size, parallel)
