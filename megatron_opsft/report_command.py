"""`megatron-opsft report`: the command, as users call it."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from megatron_opsft.command_line import Command
from megatron_opsft.errors import UserError
from megatron_opsft.report.html import MAX_MB
from megatron_opsft.runtime.console import printable


class Report(Command):
    """Print the tables of runs and evaluations, and write a page of everything: curves, settings,
    every response.
    """

    words: ClassVar[tuple[str, ...]] = ("paths",)
    examples: ClassVar[tuple[str, ...]] = (
        "report runs/quickstart",
        "report runs/a runs/b runs/b/eval --html comparison.html",
        "report runs/scaling/NAME",
    )
    paths: tuple[Path, ...] = Field(
        description="Runs, finished or not, and evaluations; or the directory of slurm/scaling.sh."
    )
    html: Path | None = Field(
        None,
        description="Page to write; by default report.html, of one path in its directory.",
    )
    max_mb: float = Field(
        MAX_MB, gt=0, description="Size of the page; responses are sampled to fit."
    )
    overwrite: bool = Field(False, description="Replace files that are there.")
    gpu: str | None = Field(
        None, description="Device of the plan beside runs nodes_1, nodes_2, ...; by default h100."
    )
    hardware: Path | None = Field(
        None, description="Figures of devices for that plan, such as `plan calibrate` prints."
    )

    def run(self) -> None:
        """Print, draw, write."""
        from megatron_opsft.plan.measured import report_scaling, scaling_runs
        from megatron_opsft.report.page import write_page
        from megatron_opsft.report.runs import describe_run

        if len(self.paths) == 1 and (scaled := scaling_runs(self.paths[0])):
            page = self.html or self.paths[0] / "report.html"
            self._check_free(self.html)
            return report_scaling(scaled, page, self.gpu, self.hardware, _say)
        if self.gpu is not None or self.hardware is not None:
            raise UserError("--gpu and --hardware need runs nodes_1, nodes_2, ...; leave them out")
        own = self.paths[0] / "report.html" if len(self.paths) == 1 else None
        page = self.html or own or Path("report.html")
        self._check_free(None if page == own else page)  # our own is written again
        evaluations = [path for path in self.paths if (path / "results.json").is_file()]
        runs = [path for path in self.paths if path not in evaluations]
        tables = {path: describe_run(path) for path in runs}
        if evaluations:
            from megatron_opsft.evaluate.comparison import compare, with_baselines  # heavy
            from megatron_opsft.evaluate.results import read_results

            for path in evaluations:
                results = [read_results(each) for each in with_baselines([path])]
                tables[path] = compare(results).text().rstrip()
            evaluations = with_baselines(evaluations)
        for path, table in tables.items():
            _say((f"{path}:\n" if len(tables) > 1 else "") + table)
        write_page(page, runs, evaluations, max_mb=self.max_mb)
        print(f"page: {page}")

    def _check_free(self, file: Path | None) -> None:
        """Errors: `UserError` for a file that would be replaced without being asked for."""
        if file is not None and file.is_file() and not self.overwrite:
            raise UserError(
                f"report: {file} exists; name another file with --html, or give --overwrite"
            )


def _say(text: str) -> None:
    print(printable(text))
