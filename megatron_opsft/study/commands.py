"""`megatron-opsft study`: the command, as users call it."""

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from megatron_opsft.command_line import Command
from megatron_opsft.errors import UserError

if TYPE_CHECKING:
    from megatron_opsft.study.study_file import StudyPlan, StudyRun


class Study(Command):
    """Train and evaluate every run of a study, then write its tables and its page.

    The same command continues what is in --out.
    """

    words: ClassVar[tuple[str, ...]] = ("file",)
    examples: ClassVar[tuple[str, ...]] = (
        "study examples/studies/paper_tiny.yaml --out runs/paper",
        "study FILE --out DIR --only 3",
    )
    file: Path = Field(description="YAML file of a study.")
    out: Path = Field(description="Directory of its runs, table.json and report.html.")
    at_once: int | None = Field(
        None,
        ge=1,
        alias="jobs",
        description="Runs at once; by default one a core, or 1 if launched.",
    )
    launcher: str = Field(
        "",
        description="What stands for megatron-opsft, such as "
        "'torchrun --nproc-per-node 8 -m megatron_opsft'.",
    )
    only: int | None = Field(
        None, ge=0, description="The run of this number alone, from 0, as in --list."
    )
    section: str | None = Field(None, description="The runs of one section alone.")
    show_list: bool = Field(False, alias="list", description="Name the runs and leave.")
    dry_run: bool = Field(False, description="Print the commands that are left, and leave.")
    page: bool = Field(False, description="Write tables and page of the runs that are there.")

    def run(self) -> None:
        """Train, evaluate, write."""
        from megatron_opsft.study.jobs import check_run, commands_of, files_of, make_runs
        from megatron_opsft.study.process import Commands
        from megatron_opsft.study.study_file import read_study

        plan = read_study(self.file)
        for run in plan.runs:
            check_run(run, files_of(self.out, run))
        chosen = self._chosen(plan)
        if self.show_list:
            for number, run in enumerate(plan.runs):
                done = "done" if files_of(self.out, run).is_finished else ""
                print(f"{number:4d}  {run.label}  {done}".rstrip())
            return
        runs = [run for run in chosen if not files_of(self.out, run).is_finished]
        if self.dry_run:
            for run in runs:
                for words in commands_of(run, files_of(self.out, run)):
                    print(shlex.join(words))
            return
        if not self.page:
            at_once = self.at_once or (1 if self.launcher else len(os.sched_getaffinity(0)))
            make_runs(self.out, runs, Commands(self.launcher), at_once)
        _show(self.out, plan)
        unfinished = sum(not files_of(self.out, run).is_finished for run in runs)
        if unfinished and not self.page:
            raise UserError(
                f"{unfinished} of {len(runs)} runs are not finished; see the page, and give the "
                "same command again"
            )

    def _chosen(self, plan: "StudyPlan") -> "list[StudyRun]":
        """The runs that --section and --only leave. Errors: `UserError` where there are none."""
        if self.section is not None and self.section not in plan.rows:
            raise UserError(f"--section {self.section}: {self.file} has {', '.join(plan.rows)}")
        if self.only is not None and self.only >= len(plan.runs):
            raise UserError(
                f"--only {self.only}: {self.file} has {len(plan.runs)} runs, numbered from 0"
            )
        numbers = range(len(plan.runs)) if self.only is None else [self.only]
        runs = [plan.runs[number] for number in numbers]
        section = self.section
        return runs if section is None else [run for run in runs if run in plan.of(section)]


def _show(out: Path, plan: "StudyPlan") -> None:
    """Write tables and page of the runs that are there."""
    from megatron_opsft.study.outputs import write_outputs
    from megatron_opsft.study.table import read_rows

    write_outputs(out, plan, read_rows(out, plan))
    print(f"page: {out / 'report.html'}; tables: {out / 'table.json'}, {out / 'table.md'}")
