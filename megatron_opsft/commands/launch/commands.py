"""`megatron-opsft launch`: its commands and their options."""

from collections.abc import Callable
from pathlib import Path

from pydantic import Field, NonNegativeInt

from megatron_opsft.commands.command_line import RunCommand, StartCommand, group
from megatron_opsft.commands.launch.fit import hardware_of_machine, warn_of_fit
from megatron_opsft.commands.launch.slurm import Slurm
from megatron_opsft.errors import log
from megatron_opsft.run.start.check import check_run
from megatron_opsft.run.start.checked_run import check_world
from megatron_opsft.runtime.phase import REQUEUE_EXIT_CODE

# Wrong input, and a loss that is not finite: a restart would fail in the same way. slurm/common.sh
# has the same rule.
FINAL_EXIT_CODES = (2, 3)


class Local(StartCommand):
    """Train on this machine, with restarts. Exit codes are those of `megatron-opsft train`."""

    examples = (
        "launch local examples/configs/quickstart.yaml --ranks 2",
        "launch local CONFIG parallel.tp=4 --ranks 8 --resume",
    )
    ranks: int = Field(1, ge=1)
    """Processes; one for each GPU."""
    max_restarts: NonNegativeInt = 3
    """How often to continue from the newest checkpoint after a failure."""

    def run(self) -> int:
        """Train. Returns the exit code of the last start."""
        config = self.load()
        check_run(
            config,
            resume=self.resume is not None,
            overwrite=self.overwrite,
            must_exist=self.resume == "yes",
            world_size=self.ranks,
        )
        warn_of_fit(config, self.ranks, hardware_of_machine(config, self.ranks))
        from megatron_opsft.commands.launch.local_ranks import LocalRanks

        command = ["train", str(self.config), *self.keys]
        first_options = []
        if self.overwrite:
            first_options.append("--overwrite")
        if self.resume:
            first_options.append(f"--resume={self.resume}")
        manifest = config.run.dir / "manifest.json"
        old_manifest_ns = _modified_ns(manifest) if self.overwrite else None
        with LocalRanks(self.ranks) as ranks:

            def start(again: bool) -> int:
                """Train on all ranks; `again` from the newest checkpoint. Returns the exit code."""
                # If the first start died before it replaced the run, that run must not be resumed.
                modified_ns = _modified_ns(manifest)
                was_replaced = old_manifest_ns is None or modified_ns != old_manifest_ns
                options = ["--resume=auto"] if again and was_replaced else first_options
                return ranks.run([*command, *options])

            return run_with_restarts(start, self.max_restarts)


class Rounds(RunCommand):
    """Make a method's fixed data and train on them, round after round, on this machine.

    The same command continues after a kill. The last round's model is run.dir/round_N/hf.
    """

    examples = (
        "launch rounds CONFIG --rounds 7 --problems 3200 --ranks 8",
        "launch rounds CONFIG method.name=crst --rounds 1",
    )
    rounds: int = Field(7, ge=1)
    """Number of rounds; each makes data and trains on them."""
    problems: int | None = Field(None, ge=1)
    """Problems of each round; by default all of them."""
    ranks: int = Field(1, ge=1)
    """Processes; one for each GPU."""

    def run(self) -> int:
        """Make the rounds. Returns the exit code of the last command."""
        from megatron_opsft.commands.launch import rounds

        config = self.load()
        check_world(self.ranks, config.parallel)
        rounds.check_rounds(config)
        warn_of_fit(config, self.ranks, hardware_of_machine(config, self.ranks))
        from megatron_opsft.commands.launch.local_ranks import LocalRanks

        plan = rounds.RoundsPlan(
            config=config,
            words=[str(self.config), *self.keys],
            count=self.rounds,
            problems=self.problems,
        )
        with LocalRanks(self.ranks) as ranks:
            return rounds.run_rounds(plan, ranks.run)


def _modified_ns(path: Path) -> int | None:
    """Return when a file was modified, in nanoseconds since the epoch; None if there is none."""
    return path.stat().st_mtime_ns if path.is_file() else None


def run_with_restarts(start: Callable[[bool], int], max_restarts: int) -> int:
    """Call `start(again)`, at most 1 + `max_restarts` times, until its exit code needs no restart.
    Returns the last exit code.

    again: False for the first start; True for a restart, which continues from the newest
    checkpoint. No restart follows 0, 75 (stopped on request: whoever asked decides when to
    continue), and `FINAL_EXIT_CODES`.
    """
    code = start(False)
    for restart in range(1, max_restarts + 1):
        if code in (0, REQUEUE_EXIT_CODE, *FINAL_EXIT_CODES):
            return code
        log.warning(
            "a rank ended with exit code %d; restart %d of %d, from the newest checkpoint",
            code,
            restart,
            max_restarts,
        )
        code = start(True)
    return code


PROGRAM = group(
    "launch",
    "Start a run: on this machine, or as a SLURM job.",
    {"local": Local, "rounds": Rounds, "slurm": Slurm},
    (
        "launch local examples/configs/quickstart.yaml --ranks 2",
        "launch slurm CONFIG --nodes 4 --dry-run",
    ),
)
