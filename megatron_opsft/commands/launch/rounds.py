"""Rounds of fixed data: each makes a method's data with the model of the round before, and trains
that model on them for one epoch.

Everything is in `run.dir`: `round_1.parquet`, the run `round_1/`, and so on. Files that exist are
not made again, so that a command that was killed continues when it is repeated.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from megatron_opsft.config import Config
from megatron_opsft.config.load import decisive_settings
from megatron_opsft.errors import UserError
from megatron_opsft.records import record
from megatron_opsft.runtime.owned_directory import OwnedDirectory


class RoundsDirectory(OwnedDirectory):
    """run.dir of rounds. Its manifest holds the settings that all rounds share."""

    kind = "rounds"
    names = ()
    manifest = "rounds.json"
    option = "run.dir="
    fix = "set it back, or name another run.dir"


Start = Callable[[Sequence[str]], int]
"""Runs `megatron-opsft` with these words on every rank, and returns its exit code."""


@record
class RoundsPlan:
    """All rounds of one run.dir."""

    config: Config
    words: Sequence[str]
    """Configuration file and overrides, from which `config` was read."""
    count: int
    """Number of rounds."""
    problems: int | None
    """Problems of each round, drawn anew for each; None: all of them."""
    steps: int | None = None
    """Training steps of each round; None: one epoch of its data."""

    def run_dir(self, number: int) -> Path:
        """Return the directory of a round's training. Rounds are counted from 1."""
        return self.config.run.dir / f"round_{number}"

    def remaining_commands(self) -> Iterator[list[str]]:
        """Yield the commands that are not done: for each round the one that makes its data, and the
        one that trains on them.

        If `steps` is None, each command must have ended before the next one is asked for: the
        number of training steps is the number of whole batches in the data.
        """
        config = self.config
        limit = [] if self.problems is None else ["--limit", str(self.problems)]
        model = str(config.model.path)
        for number in range(1, self.count + 1):
            run_dir = self.run_dir(number)
            data = run_dir.with_suffix(".parquet")
            if not (run_dir / "summary.json").is_file():
                seed = config.run.seed + number - 1
                words = [*self.words, f"model.path={model}", f"run.seed={seed}"]
                if not data.exists():
                    yield [
                        "data",
                        config.method.name,
                        *words,
                        *limit,
                        "--out",
                        str(data),
                    ]
                steps = self.steps or max(
                    1, _num_rows(data) // config.responses_per_step
                )
                words += [f"run.dir={run_dir}", f"run.steps={steps}"]
                yield ["train", *words, f"data.responses={data}", "--resume=auto"]
            model = str(run_dir / "hf")


def _num_rows(path: Path) -> int:
    import pyarrow.parquet as pq

    return int(pq.read_metadata(path).num_rows)


def check_rounds(config: Config) -> None:
    """Check that the method trains on fixed data.

    Errors: `UserError` for a method that samples while it trains.
    """
    if not config.method.has_fixed_data:
        raise UserError(
            f"method.name={config.method.name} samples while it trains and needs no rounds of "
            "fixed data; use `megatron-opsft train`"
        )


def run_rounds(plan: RoundsPlan, start: Start) -> int:
    """Run the remaining commands until one fails. Returns its exit code, or 0.

    Errors: `UserError` if rounds with other settings were begun in the same directory.
    """
    directory = RoundsDirectory(plan.config.run.dir)
    identity = {
        **decisive_settings(plan.config, with_locations=True),
        "--problems": plan.problems,
    }
    directory.check_same(identity)
    directory.path.mkdir(parents=True, exist_ok=True)
    directory.write_manifest({"identity": identity})
    exit_code, _ = run_commands(plan.remaining_commands(), start)
    return exit_code


def run_commands(
    commands: Iterable[Sequence[str]], start: Start
) -> tuple[int, Sequence[str]]:
    """Run commands one after another until one fails.

    Returns its exit code and its words; 0 and no words if none fails.
    """
    for words in commands:
        exit_code = start(words)
        if exit_code:
            return exit_code, words
    return 0, ()
