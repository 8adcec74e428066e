"""Rounds of fixed data: each makes a method's data with the model of the round before, and trains
that model on them for one epoch.

Everything is in `run.dir`: `round_1.parquet`, the run `round_1/`, and so on. What is there is not
made again, so that a command that was killed continues when it is given again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_opsft.config import Config
from megatron_opsft.errors import UserError

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

    def data(self, number: int) -> Path:
        """What a round trains on."""
        return self.config.run.dir / f"round_{number}.parquet"

    def is_done(self, number: int) -> bool:
        """Whether a round has its trained model."""
        return (self.run_dir(number) / "summary.json").is_file()

    def of_round(self, number: int) -> list[str]:
        """The run's words with what a round has of its own."""
        model = self.run_dir(number - 1) / "hf" if number > 1 else self.config.model.path
        seed = self.config.run.seed + number - 1
        return [*self.words, f"model.path={model}", f"run.seed={seed}"]

    def making(self, number: int) -> list[str]:
        """The command that makes a round's data."""
        limit = [] if self.problems is None else ["--limit", str(self.problems)]
        name, file = self.config.method.name, str(self.data(number))
        return ["data", name, *self.of_round(number), *limit, "--out", file]

    def training(self, number: int) -> list[str]:
        """The command that trains on them; an epoch is of whole batches but for fewer than one."""
        batch = self.config.data.prompts_per_step * self.config.rollout.group_size
        own = [
            f"run.dir={self.run_dir(number)}",
            f"run.steps={self.steps or max(1, _num_rows(self.data(number)) // batch)}",
            f"data.responses={self.data(number)}",
        ]
        return ["train", *self.of_round(number), *own, "--resume=auto"]

    def left(self) -> Iterator[list[str]]:
        """The commands that are not done; without `steps` each needs those before it done."""
        for number in range(1, self.count + 1):
            if self.is_done(number):
                continue
            if not self.data(number).exists():
                yield self.making(number)
            yield self.training(number)


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
    """The first exit code that is not 0, or 0. start: see `Start`."""
    rounds.config.run.dir.mkdir(parents=True, exist_ok=True)
    return next(filter(None, map(start, rounds.left())), 0)
