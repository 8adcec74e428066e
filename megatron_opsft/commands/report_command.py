"""`megatron-opsft report`: the command and its options."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pydantic import PositiveFloat

from megatron_opsft.commands.command_line import Command
from megatron_opsft.commands.diagnose.directory import is_diagnosis
from megatron_opsft.commands.report.contents import Contents
from megatron_opsft.commands.report.figures import (
    check_free,
    check_library,
    name_pictures,
    write_figures,
)
from megatron_opsft.commands.report.html import MAX_MB
from megatron_opsft.commands.report.page_sections import PageSection
from megatron_opsft.commands.study.directory import is_study
from megatron_opsft.errors import UserError
from megatron_opsft.runtime.console import say


class Report(Command):
    """Print the tables of runs, compare evaluations, and write a page of everything: curves,
    settings, every response. A study, a diagnosis or a scaling experiment is reported alone.

    Evaluations are compared on the benchmarks that all share; every setting in which they differ is
    named. One alone stands beside its baseline.
    """

    words = ("paths",)
    examples = (
        "report runs/quickstart",
        "report runs/a runs/b --html runs.html",
        "report runs/a/eval runs/b/eval --html comparison.html",
        "report runs/a/eval runs/b/eval --figures figures",
        "report runs/scaling/NAME",
    )
    paths: tuple[Path, ...]
    """Runs, finished or not, and evaluations; or one study, diagnosis, or directory of
    slurm/scaling.sh.
    """
    html: Path | None = None
    """Page to write; by default report.html, of one path in its directory."""
    figures: Path | None = None
    """Directory for papers: every chart as PDF and SVG, table.tex and table.md."""
    max_mb: PositiveFloat = MAX_MB
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
        """Print the tables, write the page, draw the figures."""
        if self.figures is not None:
            check_library()
        page = self._page()
        contents = self._read()
        pictures = name_pictures(contents.sections)
        if self.figures is not None and not self.overwrite:
            check_free(self.figures, pictures)
        say(contents.text)
        contents.write_page(page)
        say(f"page: {page}")
        if self.figures is not None:
            say(write_figures(self.figures, pictures, contents.tables))
        if contents.error is not None:
            raise contents.error

    def _page(self) -> Path:
        """Return the file of the page. Errors: `UserError` if it would replace a user's file."""
        page = self.html or Path("report.html")
        if len(self.paths) == 1:
            default = self.paths[0] / "report.html"
            if self.html in (None, default):
                return default  # our own page of this path, which is written again
        if page.is_file() and not self.overwrite:
            raise UserError(
                f"report: {page} exists; name another file with --html, or give --overwrite"
            )
        return page

    def _read(self) -> Contents:
        """Read what is reported of the paths. Errors: `UserError`."""
        from megatron_opsft.commands.plan.measured import read_scaling, scaling_runs

        evaluations = [path for path in self.paths if (path / "results.json").is_file()]
        if self.baseline is not None and not evaluations:
            raise UserError(
                f"--baseline {self.baseline}: there is no evaluation; leave it out"
            )
        if len(self.paths) == 1 and (runs := scaling_runs(self.paths[0])):
            return read_scaling(runs, self.gpu, self.hardware)
        if self.gpu is not None or self.hardware is not None:
            raise UserError(
                "--gpu and --hardware need runs nodes_1, nodes_2, ...; leave them out"
            )
        for path in self.paths:
            if is_study(path):
                self._check_alone(path, "study")
                from megatron_opsft.commands.study.page import read_study_report

                return read_study_report(path, max_mb=self.max_mb)
            if is_diagnosis(path):
                self._check_alone(path, "diagnosis")
                from megatron_opsft.commands.diagnose.page import read_diagnosis

                return read_diagnosis(path)
        return self._read_runs(evaluations)

    def _check_alone(self, path: Path, kind: str) -> None:
        """Check that no other path is reported with this one. Errors: `UserError`."""
        if len(self.paths) > 1:
            raise UserError(f"{path}: a {kind} has a report of its own; name it alone")

    def _read_runs(self, evaluations: Sequence[Path]) -> Contents:
        """Read runs, and evaluations to compare with each other."""
        from megatron_opsft.commands.report.curves import curves_of
        from megatron_opsft.commands.report.page import (
            bars_of_tokens,
            distinct,
            write_page,
        )
        from megatron_opsft.commands.report.runs import (
            describe_run,
            read_run,
            table_of_changes,
        )

        paths = [path for path in self.paths if path not in evaluations]
        texts = []
        for path in paths:
            if len(self.paths) > 1:
                texts.append(f"{path}:")
            texts.append(describe_run(path))
        runs = [
            read_run(path, name)
            for path, name in zip(paths, distinct(paths), strict=True)
        ]
        tables = [table_of_changes(run) for run in runs]
        sections = []
        if runs:
            top, others = curves_of(runs)
            sections.append(PageSection(title="Curves", plots=[*top, *others]))
        if runs and self.figures is not None:  # it reads responses, as the page does
            named_runs = dict(zip(distinct(paths), paths, strict=True))
            if bars := bars_of_tokens(named_runs, {}):
                sections.append(PageSection(title=bars.title, plots=[bars]))
        write = partial(write_page, runs=paths, max_mb=self.max_mb)
        if evaluations:
            from megatron_opsft.commands.evaluate.comparison import compare_directories

            comparison, evaluations = compare_directories(
                evaluations, baseline=self.baseline
            )
            texts.append(comparison.text().rstrip())
            tables.append(comparison.paper_table())
            sections += comparison.sections()
            write = partial(
                comparison.write_page,
                evaluations=evaluations,
                runs=paths,
                max_mb=self.max_mb,
            )
        return Contents(
            text="\n".join(texts),
            write_page=write,
            sections=sections,
            tables=tables,
        )
