"""`megatron-opsft study`: the command, as users call it."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_opsft.command_line import examples
from megatron_opsft.errors import UserError

if TYPE_CHECKING:
    from megatron_opsft.study.study_file import StudyPlan, StudyRun

EXAMPLES = examples(
    "megatron-opsft study examples/studies/paper_tiny.yaml --out runs/paper",
    "megatron-opsft study FILE --out DIR --only 3",
)


def study(
    file: Annotated[Path, typer.Argument(help="YAML file of a study.")],
    out: Annotated[Path, typer.Option(help="Directory of its runs, table.json and report.html.")],
    at_once: Annotated[
        int | None,
        typer.Option(
            "--jobs", min=1, help="Runs at once; by default one a core, or 1 if launched."
        ),
    ] = None,
    launcher: Annotated[
        str,
        typer.Option(
            help="What stands for megatron-opsft, such as "
            "'torchrun --nproc-per-node 8 -m megatron_opsft'."
        ),
    ] = "",
    only: Annotated[
        int | None,
        typer.Option(
            min=0, help="The run of this number alone, from 0, as in --list.", show_default=False
        ),
    ] = None,
    section: Annotated[
        str | None, typer.Option(help="The runs of one section alone.", show_default=False)
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Name the runs and leave.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the commands that are left, and leave.")
    ] = False,
    page: Annotated[
        bool, typer.Option("--page", help="Write tables and page of the runs that are there.")
    ] = False,
) -> None:
    """Train and evaluate every run of a study, then write its tables and its page.

    The same command continues what is in --out.
    """
    from megatron_opsft.study.jobs import check_run, commands_of, files_of
    from megatron_opsft.study.study_file import read_study

    plan = read_study(file)
    for run in plan.runs:
        check_run(run, files_of(out, run))
    if section is not None and section not in plan.rows:
        raise UserError(f"--section {section}: {file} has {', '.join(plan.rows)}")
    if show_list:
        for number, run in enumerate(plan.runs):
            done = "done" if files_of(out, run).is_finished else ""
            typer.echo(f"{number:4d}  {run.label}  {done}".rstrip())
        return
    if only is not None and only >= len(plan.runs):
        raise UserError(f"--only {only}: {file} has {len(plan.runs)} runs, numbered from 0")
    numbers = range(len(plan.runs)) if only is None else [only]
    chosen = [plan.runs[n] for n in numbers if section is None or plan.runs[n] in plan.of(section)]
    runs = [run for run in chosen if not files_of(out, run).is_finished]
    if dry_run:
        for run in runs:
            for words in commands_of(run, files_of(out, run)):
                typer.echo(shlex.join(words))
        return
    if not page:
        at_once = at_once or (1 if launcher else len(os.sched_getaffinity(0)))
        _make(out, runs, launcher, at_once)
    _show(out, plan)
    unfinished = sum(not files_of(out, run).is_finished for run in runs)
    if unfinished and not page:
        raise UserError(
            f"{unfinished} of {len(runs)} runs are not finished; see the page, and give the same "
            "command again"
        )


def _make(out: Path, runs: "Sequence[StudyRun]", launcher: str, at_once: int) -> None:
    from megatron_opsft.study.jobs import make_runs
    from megatron_opsft.study.process import Commands

    make_runs(out, runs, Commands(launcher), at_once)


def _show(out: Path, plan: "StudyPlan") -> None:
    """Write tables and page of the runs that are there."""
    from megatron_opsft.study.page import write_page
    from megatron_opsft.study.table import read_rows, write_table

    rows = read_rows(out, plan)
    write_table(out / "table.json", rows)
    write_page(out, plan, rows)
    typer.echo(f"page: {out / 'report.html'}; table: {out / 'table.json'}")
