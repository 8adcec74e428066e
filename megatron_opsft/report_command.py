"""`megatron-opsft report`: the command, as users call it."""

import shutil
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from megatron_opsft.command_line import examples
from megatron_opsft.errors import UserError
from megatron_opsft.report.page.embed import MAX_MB
from megatron_opsft.runtime.printable import printable

if TYPE_CHECKING:
    from megatron_opsft.report.page.parts import Parts

WATCH_SECONDS = 10.0
EXAMPLES = examples(
    "megatron-opsft report runs/quickstart",
    "megatron-opsft report runs/quickstart --watch",
    "megatron-opsft report runs/quickstart --figure quickstart.svg",
    "megatron-opsft report runs/a runs/b runs/b/eval --html comparison.html",
    "megatron-opsft report DIAGNOSIS",
)


class ReportCommand(TyperCommand):
    """`--watch` may stand without its seconds; what follows belongs to it if it is a number."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Fills in the seconds."""
        words = []
        for word, behind in pairwise([*args, ""]):
            alone = word == "--watch" and not _is_number(behind)
            words.append(f"--watch={WATCH_SECONDS:g}" if alone else word)
        return super().parse_args(ctx, words)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(help="Runs, finished or not, evaluations and studies; or one diagnosis."),
    ],
    figure: Annotated[
        Path | None, typer.Option(help="Where to draw the curves of one run (.png, .svg).")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Page to write; by default report.html, of one path in its directory."),
    ] = None,
    max_mb: Annotated[
        float, typer.Option(help="Size of the page; responses are sampled to fit.")
    ] = MAX_MB,
    watch: Annotated[
        float | None,
        typer.Option(
            metavar="[SECONDS]",
            help="Write the page again while a run or study goes on, at most every SECONDS "
            f"({WATCH_SECONDS:g}); an open page follows.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files that are there.")
    ] = False,
) -> None:
    """Print the tables of runs and evaluations, draw the runs' length and accuracy over steps, and
    write a page of everything: curves, settings, every response.
    """
    from megatron_opsft.report.diagnosis import is_diagnosis
    from megatron_opsft.report.page.parts import is_study, parts_of
    from megatron_opsft.report.page.write import write_page
    from megatron_opsft.report.runs import report_runs

    if diagnoses := [path for path in paths if is_diagnosis(path)]:
        if len(paths) > 1:
            raise UserError(f"{diagnoses[0]}: a diagnosis has a page of its own; give it alone")
        if figure is not None or watch is not None:
            raise UserError(f"{diagnoses[0]}: --figure and --watch are of runs, not of a diagnosis")
        return _report_diagnosis(diagnoses[0], html, max_mb, overwrite)
    parts = parts_of(paths)
    if figure is not None and len(parts.runs) != 1:
        raise UserError("--figure is of one run; without it each run gets its curves.png")
    name = "runs.html" if is_study(paths[0]) else "report.html"  # a study has its own
    own = paths[0] / name if len(paths) == 1 else None  # ours to write again
    page = html or own or Path(name)
    _check_free([figure, None if page == own else page], overwrite)
    if watch is not None:
        _follow(paths, page, watch, max_mb)
        parts = parts_of(paths)
    unread = report_runs(parts.runs, figure, lambda line: typer.echo(printable(line)))
    several = len(parts.runs + parts.evaluations) > 1
    for path in parts.evaluations:
        typer.echo(printable((f"{path}:\n" if several else "") + _evaluation_table(path)))
    runs = [path for path in parts.runs if path not in unread]
    write_page(page, runs, _with_baselines(parts.evaluations), max_mb=max_mb)
    typer.echo(f"page: {page}")
    if unread:
        raise UserError(f"{len(unread)} of {len(paths)} could not be read: {next(iter(unread))}")


def _check_free(files: Sequence[Path | None], overwrite: bool) -> None:
    """Errors: `UserError` for a file that would be replaced without being asked for."""
    for file in files:
        if file is not None and file.is_file() and not overwrite:
            raise UserError(
                f"report: {file} exists; name another file with --html or --figure, or give "
                "--overwrite"
            )


def _report_diagnosis(path: Path, html: Path | None, max_mb: float, overwrite: bool) -> None:
    from megatron_opsft.diagnose.directory import REPORT
    from megatron_opsft.diagnose.outputs import write_report

    _check_free([html], overwrite)
    page = html or path / REPORT
    typer.echo(printable(write_report(path, page, max_mb=max_mb)), nl=False)
    typer.echo(f"page: {page}")


def _follow(paths: Sequence[Path], page: Path, seconds: float, max_mb: float) -> None:
    """Keep the page as the directories are, until all has ended or a Ctrl-C."""
    from megatron_opsft.report.page.watch import watch
    from megatron_opsft.report.page.write import write_page

    if not seconds > 0:
        raise UserError(f"--watch {seconds:g}: must be above 0")
    typer.echo(f"page: {page}; Ctrl-C ends")

    def write(parts: "Parts") -> None:
        states = write_page(
            page, parts.runs, parts.evaluations, max_mb=max_mb, reload_seconds=seconds
        )
        size = page.stat().st_size / 1e6
        _progress(f"{time.strftime('%H:%M:%S')}  {_in_short(states)}  {size:.1f} MB")

    try:
        ended = watch(paths, seconds, write)
    except KeyboardInterrupt:
        ended = "stopped"
    _progress(f"{time.strftime('%H:%M:%S')}  {ended}")
    if sys.stdout.isatty():
        typer.echo()


def _in_short(states: Sequence[str]) -> str:
    if len(states) == 1:
        return states[0]
    finished = sum(state.startswith("finished") for state in states)
    return f"{finished} of {len(states)} runs finished"


def _progress(line: str) -> None:
    """In place of the line before on a terminal, below it elsewhere."""
    if not sys.stdout.isatty():
        typer.echo(line)
        return
    columns = shutil.get_terminal_size().columns
    sys.stdout.write(f"\r\x1b[K{line[: columns - 1]}")
    sys.stdout.flush()


def _with_baselines(evaluations: Sequence[Path]) -> list[Path]:
    if not evaluations:
        return []
    from megatron_opsft.evaluate.outputs import with_baselines  # heavy

    return with_baselines(evaluations)


def _evaluation_table(path: Path) -> str:
    from megatron_opsft.evaluate.outputs import table_of  # heavy

    return table_of(path)
