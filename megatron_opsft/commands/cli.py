"""The command line: `megatron-opsft`, the same as `python -m megatron_opsft`."""

import logging
import os
import shutil
import sys
import time
import traceback
import warnings
from errno import EACCES, EEXIST, EISDIR, ENAMETOOLONG, ENOTDIR, EPERM, EROFS
from pathlib import Path

import click

from megatron_opsft import __version__
from megatron_opsft.commands.api import start_training
from megatron_opsft.commands.command_line import (
    Command,
    RunCommand,
    StartCommand,
    group,
    invoke,
    reference_table,
)
from megatron_opsft.commands.convert.commands import PROGRAM as convert
from megatron_opsft.commands.diagnose.commands import Diagnose
from megatron_opsft.commands.evaluate.commands import PROGRAM as evaluate
from megatron_opsft.commands.launch.commands import PROGRAM as launch
from megatron_opsft.commands.make_data.commands import MakeData
from megatron_opsft.commands.plan.commands import PROGRAM as plan
from megatron_opsft.commands.report_command import Report
from megatron_opsft.commands.study.commands import StudyCommand
from megatron_opsft.config import Config
from megatron_opsft.config.load import load_config, to_yaml
from megatron_opsft.errors import (
    HubUnreachable,
    NonFiniteError,
    RanksMissing,
    SyncError,
    UserError,
    first_line,
)
from megatron_opsft.methods.catalog import settings_class, show_methods
from megatron_opsft.models.architectures.config_from_hf import read_model_shape
from megatron_opsft.models.storage.model_paths import resolve_model
from megatron_opsft.run.start.checked_run import fewest_ranks, make_checked_run
from megatron_opsft.runtime.console import (
    LogToStderr,
    describe_full_gpu,
    is_of_waking_vllm,
    lack_of_memory,
    let_output_go_away,
    say,
)
from megatron_opsft.runtime.durable import FullDiskError, full_disk_behind
from megatron_opsft.runtime.failed_rank import PEER_LOST_EXIT_CODE
from megatron_opsft.runtime.formatting import count_of
from megatron_opsft.runtime.launched import launched_rank
from megatron_opsft.runtime.libraries import loading_libraries
from megatron_opsft.runtime.phase import describe_rank
from megatron_opsft.runtime.watchdog import is_watched, report_failure

_LESS_MEMORY = (
    "lower train.max_tokens_per_microbatch, rollout.gpu_memory_fraction or, with hf, "
    "rollout.batch_size; or set train.recompute=full; `megatron-opsft plan` says what fits"
)
_LESS_MEMORY_FOR_VLLM = (
    "vLLM did not get back the memory that it had before its sleep: lower "
    "rollout.gpu_memory_fraction or rollout.kv_cache_bytes, and leave rollout.deep_sleep=false"
)
_REFUSALS = (EACCES, EPERM, EROFS, EEXIST, ENOTDIR, EISDIR, ENAMETOOLONG)


class Train(StartCommand):
    """Train; on several ranks with torchrun. All keys: `megatron-opsft config --reference`."""

    examples = (
        "train examples/configs/quickstart.yaml run.dir=runs/first",
        "train CONFIG optimizer.lr=1e-6 --resume=auto",
        "train CONFIG --check",
    )
    check: bool = False
    """Say what the run would do and whether it can start; compute and write nothing."""

    def run(self) -> int:
        """Train. Returns the exit code."""
        config = self.load()
        resume, must_exist = self.resume is not None, self.resume == "yes"
        if self.check:
            from megatron_opsft.commands.check import describe_start  # heavy

            say(
                describe_start(
                    config,
                    resume=resume,
                    must_exist=must_exist,
                    overwrite=self.overwrite,
                )
            )
            return 0
        return start_training(
            config, resume=resume, must_exist=must_exist, overwrite=self.overwrite
        )


class ShowConfig(Command):
    """Print the resolved configuration of a run, every key of it."""

    words = ("config",)
    keys_of = Config
    examples = (
        "config examples/configs/quickstart.yaml optimizer.lr=1e-6",
        "config --reference",
    )
    config: Path | None = None
    """YAML file of a run."""
    reference: bool = False
    """Print the table of all keys instead."""

    def run(self) -> None:
        """Print the configuration, or the table."""
        if self.reference:
            say(reference_table())
        elif self.config is None:
            raise UserError(
                "config: name a YAML file, such as examples/configs/quickstart.yaml, or ask for "
                "--reference"
            )
        else:
            say(to_yaml(load_config(self.config, self.keys)), end="")


class Fetch(RunCommand):
    """Bring a run's model and data into the Hugging Face cache, for jobs without a network.

    Needs no GPU: run it on a login node, with the HF_HOME of the job.
    """

    examples = (
        "fetch examples/configs/r1_distill_7b_paper.yaml",
        "fetch CONFIG model.path=Qwen/Qwen3-0.6B",
    )

    def run(self) -> None:
        """Fetch and read everything that a run reads, so that mistakes show up here."""
        with loading_libraries():
            from megatron_opsft.run.start.input import read_input
        config = self.load()
        model_dir = resolve_model(config.model.path)
        shape = read_model_shape(model_dir)
        checked = make_checked_run(config, shape, fewest_ranks(config))
        run_input = read_input(checked, model_dir)
        speculative = config.rollout.speculative or {}
        if draft := speculative.get("model"):
            resolve_model(draft, option="rollout.speculative.model")
        problems = count_of([len(run_input.problems.problems)], "problem")
        say(f"{config.model.path} and its data, {problems}, are here")


class Methods(Command):
    """List the methods that `method.name` can be: formula, paper, what each needs."""

    words = ("name",)
    examples = ("methods", "methods laser")
    name: str | None = None
    """Print the keys of this one instead."""

    def run(self) -> None:
        """Print the list, or the keys of one method."""
        if self.name is not None:
            say(reference_table(settings_class({"name": self.name}), prefix="method."))
        else:
            say(show_methods(width=shutil.get_terminal_size((120, 24)).columns), end="")


PROGRAM = group(
    "megatron-opsft",
    "On-policy SFT for shorter reasoning, on Megatron-Core.",
    {
        "train": Train,
        "config": ShowConfig,
        "fetch": Fetch,
        "methods": Methods,
        "convert": convert,
        "eval": evaluate,
        "plan": plan,
        "launch": launch,
        "data": MakeData,
        "study": StudyCommand,
        "diagnose": Diagnose,
        "report": Report,
    },
    (
        "train examples/configs/quickstart.yaml",
        "eval --model runs/quickstart --out runs/quickstart/eval",
    ),
)
PROGRAM = click.version_option(__version__, message="%(prog)s %(version)s")(PROGRAM)


def main(program: click.Command = PROGRAM) -> None:
    """Run the console script: an error that the user can fix is one line and exit code 2."""
    let_output_go_away()
    if not sys.warnoptions:
        # Deprecations inside Megatron and torch: many on every rank, none for the user to fix.
        warnings.simplefilter("ignore")
    # If a rank dies, its store goes with it, and PyTorch would print a stack beside our line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.basicConfig(
        level=logging.WARNING,
        format="%(levelname)s %(message)s",
        handlers=[LogToStderr()],
    )
    logging.getLogger("megatron_opsft").setLevel(logging.INFO)
    try:
        code = invoke(program)
    except Exception as error:
        explained = _explain(error)
        if explained is not None:
            message, code = explained
            _exit(f"error: {message}", code)
        if not is_watched():
            raise
        _exit(f"error: {describe_rank()}: {first_line(error)}", 1, error)
    sys.exit(code)


def _explain(error: Exception) -> tuple[str, int] | None:
    """Return the message and exit code of an error that the user can fix; None for a bug."""
    match error:
        case HubUnreachable():
            return str(error), PEER_LOST_EXIT_CODE
        case FullDiskError():
            return _explain_full_disk(error), 2
        case UserError():
            return str(error), 2
        case NonFiniteError():
            # The same on every rank; the message names the rank that it comes from.
            return str(error), 3
        case SyncError():
            return f"{describe_rank()}: {error}", 3
        case RanksMissing():
            return f"{describe_rank()}: {error}", PEER_LOST_EXIT_CODE
    message = _explain_machine(error)
    return (message, 2) if message else None


def _explain_full_disk(error: Exception) -> str:
    return (
        f"{error}; make room, then give the same command again, `train` with --resume"
    )


def _explain_machine(error: Exception) -> str:
    """Explain an error for which the machine is the cause; "" for any other."""
    if full_disk := full_disk_behind(error):
        return f"{describe_rank()}: {_explain_full_disk(full_disk)}"
    if full_gpu := describe_full_gpu(error):
        of_vllm = is_of_waking_vllm(full_gpu)
        remedy = _LESS_MEMORY_FOR_VLLM if of_vllm else _LESS_MEMORY
        return f"{describe_rank()}: {full_gpu}; {remedy}"
    if isinstance(error, OSError) and error.filename and error.errno in _REFUSALS:
        refusal = f"{error.filename}: {error.strerror}"
        return f"{refusal}; name another place, or change its permissions"
    if isinstance(error, UnicodeEncodeError) and error.encoding == "ascii":
        # The name of a file.
        return f"{error.object!a} cannot be named in this locale: set LC_ALL=C.UTF-8"
    lack = lack_of_memory(error)
    return f"{describe_rank()}: {lack}" if lack else ""


def _exit(message: str, code: int, error: Exception | None = None) -> None:
    """Print and leave at once: other ranks may stay in a collective for ever.

    Watched ranks agree on whose error it is. Only that rank prints, and all exit with its code.
    error: its traceback is printed too.
    """
    rank = launched_rank()
    if not is_watched() and rank > 0:
        # Most errors occur on every rank: let rank 0 print and end the job.
        time.sleep(3)
    is_own_error = True
    diagnosis = report_failure(code, message)
    if diagnosis is not None:
        code = diagnosis.code
        is_own_error = diagnosis.rank == rank
    if is_own_error:
        if error is not None:
            say("".join(traceback.format_exception(error)), error=True)
        say(message, error=True)
    os._exit(code)
