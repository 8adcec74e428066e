"""Rounds of fixed data: each makes a method's data with the model of the round before, and trains
that model on them for one epoch.

Everything is in `run.dir`: `round_1.parquet`, the run `round_1/`, and so on. What is there is not
made again, so that a command that was killed continues when it is given again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_opsft.config import Config
from megatron_opsft.config.load import decisive_settings
from megatron_opsft.errors import UserError
from megatron_opsft.runtime.owned_directory import OwnedDirectory


class RoundsDirectory(OwnedDirectory):
    """run.dir of rounds; its manifest has what all of them have in common."""

    kind = "rounds"
    names = ()
    manifest = "rounds.json"
    option = "run.dir="
    fix = "set it back, or name another run.dir"


Start = Callable[[Sequence[str]], int]
"""Runs `megatron-opsft` with these words on every rank; its exit code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """words: configuration file and overrides, that `config` was read from; problems: drawn anew
    for each round, None for all of them; steps: of each round, None for one epoch of its data.
    """

    config: Config
    words: Sequence[str]
    count: int
    problems: int | None
    steps: int | None = None

    def run_dir(self, number: int) -> Path:
        """Of a round, counted from 1."""
        return self.config.run.dir / f"round_{number}"

    def left(self) -> Iterator[list[str]]:
        """The commands that are not done: of each round the one that makes its data and the one
        that trains on them, for an epoch of whole batches. Without `steps` each needs those before
        it done.
        """
        config = self.config
        limit = [] if self.problems is None else ["--limit", str(self.problems)]
        batch = config.data.prompts_per_step * config.rollout.group_size
        for number in range(1, self.count + 1):
            run_dir, data = (
                self.run_dir(number),
                config.run.dir / f"round_{number}.parquet",
            )
            if (run_dir / "summary.json").is_file():
                continue
            model = self.run_dir(number - 1) / "hf" if number > 1 else config.model.path
            seed = config.run.seed + number - 1
            words = [*self.words, f"model.path={model}", f"run.seed={seed}"]
            if not data.exists():
                yield ["data", config.method.name, *words, *limit, "--out", str(data)]
            steps = self.steps or max(1, _num_rows(data) // batch)
            own = [f"run.dir={run_dir}", f"run.steps={steps}", f"data.responses={data}"]
            yield ["train", *words, *own, "--resume=auto"]


def _num_rows(path: Path) -> int:
    import pyarrow.parquet as pq

    return int(pq.read_metadata(path).num_rows)


def check_rounds(config: Config) -> None:
    """Errors: `UserError` for a method that samples while it trains."""
    if not config.method.has_fixed_data:
        raise UserError(
            f"method.name={config.method.name} samples while it trains and needs no rounds of "
            "fixed data; use `megatron-opsft train`"
        )


def run_rounds(rounds: Rounds, start: Start) -> int:
    """The first exit code that is not 0, or 0. start: see `Start`. Errors: `UserError` for other
    settings than those of the rounds that are there.
    """
    directory = RoundsDirectory(rounds.config.run.dir)
    identity = {
        **decisive_settings(rounds.config, with_locations=True),
        "--problems": rounds.problems,
    }
    directory.check_same(identity)
    directory.path.mkdir(parents=True, exist_ok=True)
    directory.write_manifest({"identity": identity})
    return next(filter(None, map(start, rounds.left())), 0)
