"""`launch slurm`: calls sbatch with the same script that users submit by hand.

Only the script knows how a job runs; this module sets its variables and sbatch's options.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from pydantic import Field

from megatron_opsft.commands.command_line import RunCommand
from megatron_opsft.commands.launch.fit import hardware_of_slurm, warn_of_fit
from megatron_opsft.config.yaml_text import find_yaml
from megatron_opsft.errors import UserError
from megatron_opsft.run.start.checked_run import check_world
from megatron_opsft.runtime.console import say

# A link to the project's slurm/ folder; in an installed package, a copy of it.
SCRIPTS = Path(__file__).parent / "scripts"


class Slurm(RunCommand):
    """Submit slurm/train.sh for this configuration, with these resources.

    Settings of the site are environment variables, as for the script itself (slurm/common.sh).
    """

    examples = (
        "launch slurm CONFIG run.dir=runs/a --nodes 4 --partition gpu",
        "launch slurm CONFIG --sbatch=--qos=high --dry-run",
    )
    nodes: int = Field(1, ge=1)
    """Nodes of a job."""
    ranks_per_node: int = Field(8, ge=1)
    """Processes on each node; one for each GPU."""
    gpus_per_node: int | None = Field(None, ge=0)
    """By default one for each rank; 0: none."""
    partition: str | None = None
    """By default SLURM's."""
    account: str | None = None
    """By default yours."""
    time: str | None = None
    """Limit; by default 24:00:00."""
    sbatch: tuple[str, ...] = ()
    """Another option of sbatch, such as --sbatch=--qos=high; repeatable."""
    dry_run: bool = False
    """Print the command line instead of running it."""

    def run(self) -> None:
        """Submit the job, or print a command line that submits it from the same directory.

        Errors: `UserError`, with sbatch's reason if it refuses the job.
        """
        config = self.load()
        world_size = self.nodes * self.ranks_per_node
        check_world(world_size, config.parallel)
        if self.gpus_per_node != 0 and config.run.device != "cpu":
            gpus = hardware_of_slurm(self.sbatch, self.partition, self.ranks_per_node)
            warn_of_fit(config, world_size, gpus)
        # The directories of the project, of its scripts and of this Python's environment.
        variables = {
            "PROJECT_DIR": str(Path.cwd()),
            "SCRIPT_DIR": str(SCRIPTS.resolve()),
        }
        if not {"VENV", "PYTHON", "CONTAINER_IMAGE"} & os.environ.keys():
            variables["VENV"] = sys.prefix
        command = self._command(config.run.dir)
        if self.dry_run:
            settings = [f"{name}={value}" for name, value in variables.items()]
            say(shlex.join(["env", *settings, *command]))
            return
        if shutil.which("sbatch") is None:
            raise UserError(
                "there is no sbatch here: run this on a SLURM login node, or use --dry-run"
            )
        sbatch = subprocess.run(
            command, env=os.environ | variables, capture_output=True, text=True
        )
        if sbatch.returncode:
            reason = " ".join(sbatch.stderr.split()) or f"exit code {sbatch.returncode}"
            raise UserError(
                f"sbatch refused the job: {reason} (its command line: --dry-run)"
            )
        say(sbatch.stdout.strip())

    def _command(self, run_dir: Path) -> list[str]:
        """Return the words of sbatch, its options, the script and the script's arguments.

        Errors: `UserError` for blanks or *?[ in the path of the configuration file.
        """
        path = str(find_yaml(self.config).absolute())
        if any(character in path for character in " \t\n*?["):
            raise UserError(
                f"{path}: blanks or *?[ in the path of a job's config; rename it"
            )
        gpus = self.ranks_per_node if self.gpus_per_node is None else self.gpus_per_node
        options = {
            "job-name": f"opsft-{run_dir.name}",
            "nodes": self.nodes,
            "ntasks-per-node": self.ranks_per_node,
            "gpus-per-node": gpus,
            "partition": self.partition,
            "account": self.account,
            "time": self.time,
        }
        values = [
            f"--{name}={value}" for name, value in options.items() if value is not None
        ]
        script = str(SCRIPTS.resolve() / "train.sh")
        return ["sbatch", *values, *self.sbatch, script, path, *self.keys]
