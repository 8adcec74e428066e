"""`megatron-opsft report`: the command, as users call it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from megatron_opsft.command_line import Command
from megatron_opsft.errors import UserError
from megatron_opsft.report.html import MAX_MB
from megatron_opsft.runtime.console import say


class Report(Command):
    """Print the tables of runs, compare evaluations, and write a page of everything: curves,
    settings, every response.

    Evaluations are compared on the benchmarks that all share; every setting in which they differ is
    named. One alone stands beside its baseline.
    """

    words: ClassVar[tuple[str, ...]] = ("paths",)
    examples: ClassVar[tuple[str, ...]] = (
        "report runs/quickstart",
        "report runs/a runs/b --html runs.html",
        "report runs/a/eval runs/b/eval --html comparison.html",
        "report runs/scaling/NAME",
    )
    paths: tuple[Path, ...]
    """Runs, finished or not, and evaluations; or the directory of slurm/scaling.sh."""
    html: Path | None = None
    """Page to write; by default report.html, of one path in its directory."""
    max_mb: float = Field(MAX_MB, gt=0)
    """Size of the page; responses are sampled to fit."""
    overwrite: bool = False
    """Replace files that are there."""
    baseline: str | None = None
    """Label of the model that is 100 % of every CR; by default the first one."""
    gpu: str | None = None
    """Device of the plan beside runs nodes_1, nodes_2, ...; by default h100."""
    hardware: Path | None = None
    """Figures of devices for that plan, such as `plan calibrate` prints."""

    def run(self) -> None:
        """Print, draw, write."""
        from megatron_opsft.plan.measured import report_scaling, scaling_runs
        from megatron_opsft.report.page import write_page
        from megatron_opsft.report.runs import describe_run

        evaluations = [path for path in self.paths if (path / "results.json").is_file()]
        if self.baseline is not None and not evaluations:
            raise UserError(f"--baseline {self.baseline}: there is no evaluation; leave it out")
        if len(self.paths) == 1 and (scaled := scaling_runs(self.paths[0])):
            page = self.html or self.paths[0] / "report.html"
            self._check_free(self.html)
            return report_scaling(scaled, page, self.gpu, self.hardware, say)
        if self.gpu is not None or self.hardware is not None:
            raise UserError("--gpu and --hardware need runs nodes_1, nodes_2, ...; leave them out")
        own = self.paths[0] / "report.html" if len(self.paths) == 1 else None
        page = self.html or own or Path("report.html")
        self._check_free(None if page == own else page)  # our own is written again
        runs = [path for path in self.paths if path not in evaluations]
        tables = [(f"{run}:\n" if len(self.paths) > 1 else "") + describe_run(run) for run in runs]
        write: Callable[..., None] = partial(write_page, page, runs)
        if evaluations:
            from megatron_opsft.evaluate.comparison import compare, with_baseline  # heavy
            from megatron_opsft.evaluate.results import read_results

            if len(evaluations) == 1:
                evaluations = with_baseline(evaluations[0])
            results = [read_results(path) for path in evaluations]
            comparison = compare(results, baseline=self.baseline)
            tables.append(comparison.text().rstrip())
            write = partial(comparison.write_page, page, evaluations, runs)
        for table in tables:
            say(table)
        write(max_mb=self.max_mb)
        say(f"page: {page}")

    def _check_free(self, file: Path | None) -> None:
        """Errors: `UserError` for a file that would be replaced without being asked for."""
        if file is not None and file.is_file() and not self.overwrite:
            raise UserError(
                f"report: {file} exists; name another file with --html, or give --overwrite"
            )
