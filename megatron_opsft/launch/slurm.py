"""`launch slurm`: a command line of sbatch for the same script that users submit by hand.

The script alone knows how a job runs; here are its variables and sbatch's options.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from megatron_opsft.config_section import Section
from megatron_opsft.errors import UserError

SCRIPTS = Path(__file__).parent / "scripts"  # the project's slurm/ folder; installed, a copy of it
SCRIPT = "train.sh"


class Resources(Section):
    """What sbatch is asked for; None leaves it to the script, the environment, or SLURM."""

    nodes: int = Field(1, ge=1, description="Nodes of a job.")
    ranks_per_node: int = Field(8, ge=1, description="One for each GPU.")
    gpus_per_node: int | None = Field(
        None, ge=0, description="By default one for each rank; 0: none."
    )
    partition: str | None = Field(None, description="By default SLURM's.")
    account: str | None = Field(None, description="By default yours.")
    time: str | None = Field(None, description="Limit; by default 24:00:00.")
    job_name: str | None = Field(None, description="By default from run.dir.")
    sbatch: tuple[str, ...] = Field(
        (), description="Another option of sbatch, such as --sbatch=--qos=high; repeatable."
    )

    @property
    def gpus(self) -> int:
        """GPUs of a node."""
        return self.ranks_per_node if self.gpus_per_node is None else self.gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """variables: on top of the caller's environment. command: sbatch, its options, the script."""

    variables: dict[str, str]
    command: tuple[str, ...]

    def command_line(self) -> str:
        """What a shell in the same directory would be given for the same job."""
        settings = [f"{name}={value}" for name, value in self.variables.items()]
        return shlex.join(["env", *settings, *self.command])


def batch_job(
    config: Path, run_dir: Path, overrides: Sequence[str], resources: Resources
) -> BatchJob:
    """Errors: `UserError` where the configuration's path has blanks."""
    path = str(config.absolute())
    if any(character in path for character in " \t\n*?["):
        raise UserError(f"{path}: blanks or *?[ in the path of a job's config; rename it")
    variables = {
        "PROJECT_DIR": str(Path.cwd()),
        "SCRIPT_DIR": str(SCRIPTS.resolve()),
    }
    if not {"VENV", "PYTHON", "CONTAINER_IMAGE"} & os.environ.keys():
        variables["VENV"] = sys.prefix
    name = resources.job_name or f"opsft-{run_dir.name}"
    options = [
        f"--job-name={name}",
        f"--nodes={resources.nodes}",
        f"--ntasks-per-node={resources.ranks_per_node}",
        f"--gpus-per-node={resources.gpus}",
    ]
    for option in ("partition", "account", "time"):
        if value := getattr(resources, option):
            options.append(f"--{option}={value}")
    script = str(SCRIPTS.resolve() / SCRIPT)
    command = ("sbatch", *options, *resources.sbatch, script, path, *overrides)
    return BatchJob(variables=variables, command=command)


def submit(job: BatchJob) -> str:
    """Hand the job to SLURM; sbatch's answer. Errors: `UserError` with sbatch's reason."""
    if shutil.which("sbatch") is None:
        raise UserError("there is no sbatch here: run this on a SLURM login node, or use --dry-run")
    ended = subprocess.run(
        job.command, env={**os.environ, **job.variables}, capture_output=True, text=True
    )
    if ended.returncode:
        reason = " ".join(ended.stderr.split()) or f"exit code {ended.returncode}"
        raise UserError(f"sbatch refused the job: {reason} (its command line: --dry-run)")
    return ended.stdout.strip()
