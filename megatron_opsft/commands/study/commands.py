"""`megatron-opsft study`: the command, as users call it."""

import os
import shlex
from pathlib import Path

from pydantic import Field

from megatron_opsft.commands.command_line import Command
from megatron_opsft.errors import UserError
from megatron_opsft.runtime.console import say


class StudyCommand(Command):
    """Train and evaluate every run of a study, then write its tables and its page.

    The same command continues what is in --out.
    """

    words = ("file",)
    examples = (
        "study examples/studies/paper_tiny.yaml --out runs/paper",
        "study FILE --out DIR --only 3",
    )
    file: Path
    """YAML file of a study."""
    out: Path
    """Directory of its runs, table.json and report.html."""
    at_once: int | None = Field(None, ge=1, alias="jobs")
    """Runs at once; by default one for each core, or 1 with --launcher."""
    launcher: str = ""
    """What to run in place of megatron-opsft, such as 'torchrun --nproc-per-node 8 -m
    megatron_opsft'.
    """
    only: int | None = Field(None, ge=0)
    """Only the run with this number, from 0, as --list shows it."""
    show_list: bool = Field(False, alias="list")
    """List the runs and exit."""
    dry_run: bool = False
    """Print the commands that are still to run, and exit."""
    page: bool = False
    """Only write tables and page, of the finished runs."""

    def run(self) -> None:
        """Train and evaluate the runs, write tables and page; or only what an option asks for."""
        from megatron_opsft.commands.study.jobs import (
            check_study_run,
            commands_of,
            make_runs,
        )
        from megatron_opsft.commands.study.page import write_outputs
        from megatron_opsft.commands.study.results import read_study_rows
        from megatron_opsft.commands.study.study_file import read_study

        plan = read_study(self.file, self.out)
        for run in plan.runs:
            check_study_run(run)
        chosen = plan.runs
        if self.only is not None:
            if self.only >= len(plan.runs):
                raise UserError(
                    f"--only {self.only}: {self.file} has {len(plan.runs)} runs, numbered from 0"
                )
            chosen = [plan.runs[self.only]]
        if self.show_list:
            for number, run in enumerate(plan.runs):
                state = "  done" if run.is_finished else ""
                say(f"{number:4d}  {run.label}{state}")
            return
        to_make = [run for run in chosen if not run.is_finished]
        if self.dry_run:
            for run in to_make:
                for words in commands_of(run):
                    say(shlex.join(words))
            return
        if not self.page:
            default = 1 if self.launcher else len(os.sched_getaffinity(0))
            make_runs(to_make, self.launcher, self.at_once or default)
        write_outputs(self.out, plan.study, read_study_rows(self.out, plan))
        say(f"page: {self.out / 'report.html'}; tables: table.json, table.md beside it")
        unfinished = sum(not run.is_finished for run in to_make)
        if unfinished and not self.page:
            raise UserError(
                f"{unfinished} of {len(to_make)} runs are not finished; see the page, and give the "
                "same command again"
            )
