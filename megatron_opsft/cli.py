"""The command line: `megatron-opsft`, the same as `python -m megatron_opsft`."""

import errno
import json
import logging
import os
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

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
    invoke,
)
from megatron_opsft.convert.commands import app as convert_app
from megatron_opsft.diagnose.commands import EXAMPLES as DIAGNOSE_EXAMPLES
from megatron_opsft.diagnose.commands import diagnose
from megatron_opsft.errors import NonFiniteError, RanksMissing, SyncError, UserError
from megatron_opsft.evaluate.commands import app as eval_app
from megatron_opsft.launch.commands import app as launch_app
from megatron_opsft.make_data.commands import EXAMPLES, data
from megatron_opsft.plan.commands import app as plan_app
from megatron_opsft.report_command import EXAMPLES as REPORT_EXAMPLES
from megatron_opsft.report_command import ReportCommand, report
from megatron_opsft.runtime.diagnosis import PEER_LOST_EXIT_CODE
from megatron_opsft.runtime.durable import FullDiskError, full_disk_behind
from megatron_opsft.runtime.lasting_output import let_output_go_away
from megatron_opsft.runtime.launcher import usual_variables
from megatron_opsft.runtime.loading import loading_libraries
from megatron_opsft.runtime.phase import describe_rank
from megatron_opsft.runtime.printable import printable
from megatron_opsft.runtime.process_limits import check_arguments, fault_of_start
from megatron_opsft.runtime.watchdog import is_watched, report_failure
from megatron_opsft.study.commands import EXAMPLES as STUDY_EXAMPLES
from megatron_opsft.study.commands import study

_REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS)

app = typer.Typer(
    name="megatron-opsft",
    help="On-policy SFT for shorter reasoning, on Megatron-Core.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # boxes would make the help twice as long
    epilog=examples(
        "megatron-opsft train examples/configs/quickstart.yaml",
        "megatron-opsft eval --model runs/quickstart --out runs/quickstart/eval",
    ),
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"megatron-opsft {version('megatron-opsft')}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and leave."
        ),
    ] = False,
) -> None:
    """On-policy SFT for shorter reasoning, on Megatron-Core."""


app.add_typer(convert_app, name="convert")
app.add_typer(eval_app, name="eval")
app.add_typer(plan_app, name="plan")
app.add_typer(launch_app, name="launch")
app.command(epilog=EXAMPLES)(data)
app.command(epilog=STUDY_EXAMPLES)(study)
app.command(epilog=DIAGNOSE_EXAMPLES)(diagnose)
app.command(cls=ReportCommand, epilog=REPORT_EXAMPLES)(report)


@app.command(
    cls=RunCommand,
    epilog=examples(
        "megatron-opsft train examples/configs/quickstart.yaml run.dir=runs/first",
        "torchrun --nproc-per-node 2 -m megatron_opsft train CONFIG parallel.tp=2",
    ),
)
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Resume = None,
    overwrite: Overwrite = False,
) -> None:
    """Train; on several ranks with torchrun. All keys: `megatron-opsft config --reference`."""
    from megatron_opsft.config_file import load_config

    check_start(resume=resume, overwrite=overwrite)
    from megatron_opsft.preflight.check import opened_run

    loaded = load_config(config, overrides or [])
    resuming, must_exist = resume is not None, resume is ResumeMode.YES
    with (
        _explaining_loss(loaded.run.dir),
        opened_run(
            loaded, resume=resuming, overwrite=overwrite, must_exist=must_exist
        ) as something_is_left,
    ):
        if not something_is_left:
            typer.echo(f"{loaded.run.dir}: the run is finished; nothing is left")
            return
        with loading_libraries():
            from megatron_opsft.train import train as run_training

        code = run_training(loaded, resume=resuming, overwrite=overwrite)
    raise typer.Exit(code)


@app.command(
    name="config",
    cls=RunCommand,
    epilog=examples(
        "megatron-opsft config examples/configs/quickstart.yaml optimizer.lr=1e-6",
        "megatron-opsft config --reference",
    ),
)
def show_config(
    config: Annotated[Path | None, typer.Argument(help="YAML file of a run.")] = None,
    overrides: Overrides = None,
    reference: Annotated[
        bool, typer.Option("--reference", help="Print the table of all keys instead.")
    ] = False,
) -> None:
    """Print the resolved configuration of a run, every key of it."""
    from megatron_opsft.config_file import load_config, to_yaml
    from megatron_opsft.config_reference import reference_table

    if reference:
        typer.echo(reference_table())
    elif config is None:
        raise UserError(
            "config: name a YAML file, such as examples/configs/quickstart.yaml, or ask for "
            "--reference"
        )
    else:
        typer.echo(to_yaml(load_config(config, overrides or [])), nl=False)


@app.command(epilog=examples("megatron-opsft methods", "megatron-opsft methods --json"))
def methods(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print them as JSON, with settings.")
    ] = False,
) -> None:
    """List the methods that `method.name` can be: formula, paper, what each needs."""
    from megatron_opsft.methods.table import describe_methods, show_methods

    if as_json:
        typer.echo(json.dumps(describe_methods(), indent=1))
    else:
        typer.echo(show_methods(width=shutil.get_terminal_size((120, 24)).columns), nl=False)


def main() -> None:
    """Entry point of the console script."""
    run(app)


def run(commands: typer.Typer) -> None:
    """Call the commands: errors a user can fix are one line and exit code 2, no traceback."""
    let_output_go_away()
    os.environ.update(usual_variables(os.environ))
    if not sys.warnoptions:
        # Deprecations inside Megatron and torch: many on every rank, none for the user to fix.
        warnings.simplefilter("ignore")
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(message)s", handlers=[_ToStderr()]
    )
    logging.getLogger("megatron_opsft").setLevel(logging.INFO)
    try:
        check_arguments(sys.argv)
        code = invoke(commands)
    except FullDiskError as error:
        _exit(f"error: {error}; make room, then give the same command again", 2)
    except UserError as error:
        _exit(f"error: {error}", 2)
    except NonFiniteError as error:  # the same on every rank, and it names the one it came from
        _exit(f"error: {error}", 3)
    except SyncError as error:
        _exit(f"error: {describe_rank()}: {error}", 3)
    except RanksMissing as error:
        _exit(f"error: {describe_rank()}: {error}", PEER_LOST_EXIT_CODE)
    except Exception as error:
        if full := full_disk_behind(error):
            reason = f"{describe_rank()}: {full}"
            _exit(f"error: {reason}; make room, then give the same command again", 2)
        if refused := _refused_file(error):
            _exit(f"error: {refused}; name another place, or change its permissions", 2)
        if fault := fault_of_start(error):
            _exit(f"error: {describe_rank()}: {fault}", 2)
        if not is_watched():
            raise
        lines = str(error).splitlines() or [""]
        _exit(f"error: {describe_rank()}: {type(error).__name__}: {lines[0]}", 1, error)
    sys.exit(code)


class _ToStderr(logging.StreamHandler[Any]):
    """Writes to what is `sys.stderr` at the moment: a bar on the terminal takes its place."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))

    def emit(self, record: logging.LogRecord) -> None:
        """A line above the bar, if there is one."""
        self.stream = sys.stderr
        super().emit(record)


@contextmanager
def _explaining_loss(run_dir: Path) -> Iterator[None]:
    """Say how a training run continues when the disk was full, or its directory is gone; other
    commands do as they began.
    """
    try:
        yield
    except FullDiskError as error:
        raise UserError(f"{error}; make room, then continue with --resume") from error
    except (UserError, NonFiniteError, SyncError):
        raise
    except Exception as error:
        if isinstance(error, FileNotFoundError) and not run_dir.exists():
            raise UserError(
                f"run.dir={run_dir} was deleted while the run was writing to it"
            ) from error
        if (full := full_disk_behind(error)) is None:
            raise
        reason = f"{describe_rank()}: {full}"
        raise UserError(f"{reason}; make room, then continue with --resume") from error


def _refused_file(error: Exception) -> str | None:
    """Which file may not be read or written, if that is what an error says."""
    if isinstance(error, OSError) and error.filename and error.errno in _REFUSALS:
        return f"{error.filename}: {error.strerror}"
    return None


def _exit(message: str, code: int, trace: Exception | None = None) -> None:
    """Print and leave; not waiting for other ranks, which may be in a collective for ever.

    Watched ranks agree on whose error it is: it alone speaks, and its exit code is everyone's.
    """
    rank = int(os.environ.get("RANK", "0"))
    if not is_watched() and rank > 0:
        time.sleep(3)  # most errors are every rank's: let rank 0 say it and end the job
    diagnosis = report_failure(code, message)
    if diagnosis is None or diagnosis.rank == rank:
        if trace is not None:
            print(printable("".join(traceback.format_exception(trace))), file=sys.stderr)
        print(printable(message), file=sys.stderr, flush=True)
    os._exit(diagnosis.code if diagnosis is not None else code)
