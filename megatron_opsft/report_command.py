"""`megatron-opsft report`: the command, as users call it."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from megatron_opsft.command_line import Command
from megatron_opsft.errors import UserError
from megatron_opsft.report.page.html import MAX_MB
from megatron_opsft.runtime.console import printable


class Report(Command):
    """Print the tables of runs and evaluations, and write a page of everything: curves, settings,
    every response.
    """

    words: ClassVar[tuple[str, ...]] = ("paths",)
    examples: ClassVar[tuple[str, ...]] = (
        "report runs/quickstart",
        "report runs/a runs/b runs/b/eval --html comparison.html",
        "report DIAGNOSIS",
        "report runs/scaling/NAME",
    )
    paths: tuple[Path, ...] = Field(
        description="Runs, finished or not, evaluations and studies; or one diagnosis, or what "
        "slurm/scaling.sh has made."
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
        from megatron_opsft.report.diagnosis import is_diagnosis
        from megatron_opsft.report.page.write import write_page
        from megatron_opsft.report.runs import report_runs
        from megatron_opsft.report.sources import is_study, parts_of

        if diagnoses := [path for path in self.paths if is_diagnosis(path)]:
            return self._report_diagnosis(diagnoses[0])
        if len(self.paths) == 1 and (runs := scaling_runs(self.paths[0])):
            return report_scaling(runs, self.gpu, self.hardware, _say)
        if self.gpu is not None or self.hardware is not None:
            raise UserError("--gpu and --hardware are of runs nodes_1, nodes_2, ...: leave them")
        parts = parts_of(self.paths)
        name = "runs.html" if is_study(self.paths[0]) else "report.html"  # a study has its own
        own = self.paths[0] / name if len(self.paths) == 1 else None  # ours to write again
        page = self.html or own or Path(name)
        self._check_free(None if page == own else page)
        unread = report_runs(parts.runs, _say)
        baselines = parts.evaluations
        if parts.evaluations:
            from megatron_opsft.evaluate.comparison import table_of, with_baselines  # heavy

            several = len(parts.runs + parts.evaluations) > 1
            for path in parts.evaluations:
                _say((f"{path}:\n" if several else "") + table_of(path))
            baselines = with_baselines(parts.evaluations)
        runs = [path for path in parts.runs if path not in unread]
        write_page(page, runs, baselines, max_mb=self.max_mb)
        print(f"page: {page}")
        if unread:
            raise UserError(
                f"{len(unread)} of {len(self.paths)} could not be read: {next(iter(unread))}"
            )

    def _check_free(self, file: Path | None) -> None:
        """Errors: `UserError` for a file that would be replaced without being asked for."""
        if file is not None and file.is_file() and not self.overwrite:
            raise UserError(
                f"report: {file} exists; name another file with --html, or give --overwrite"
            )

    def _report_diagnosis(self, path: Path) -> None:
        from megatron_opsft.diagnose.directory import REPORT
        from megatron_opsft.diagnose.outputs import write_report

        if len(self.paths) > 1:
            raise UserError(f"{path}: a diagnosis has a page of its own; give it alone")
        self._check_free(self.html)
        page = self.html or path / REPORT
        print(printable(write_report(path, page, max_mb=self.max_mb)), end="")
        print(f"page: {page}")


def _say(text: str) -> None:
    print(printable(text))
