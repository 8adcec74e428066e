"""The file of a study: runs trained and evaluated alike, except for what each one changes."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from megatron_opsft.config import Config
from megatron_opsft.config.load import load, load_config, read_yaml
from megatron_opsft.config.run_prompt import SECTIONS
from megatron_opsft.errors import UserError
from megatron_opsft.section import Section

Keys = dict[str, Any]


class RunEntry(Section):
    """What one row of a table changes."""

    train: bool = True
    """false: evaluate the model as it is."""
    config: Path | None = None
    """YAML file of the run, if not the study's."""
    set: Keys = {}
    """Keys of the run's configuration, such as method.name."""
    eval: Keys = {}
    """Settings of its evaluation."""
    data_problems: int | None = Field(None, ge=1)
    """Problems to make fixed data from; null: all of them."""
    rounds: int = Field(1, ge=1)
    """How often fixed data are made; run.steps are divided among the rounds."""
    seeds: tuple[int, ...] | None = Field(None, min_length=1)
    """If not the study's."""
    note: str = ""
    """What a reader of the table should know about it."""


class StudySection(Section):
    """One table and one figure of the page."""

    title: str
    """Its heading."""
    text: str = ""
    """What it asks, in a sentence or two."""
    runs: dict[str, RunEntry | None] = Field(min_length=1)
    """Name -> what differs."""


class Study(Section):
    """The whole file. Paths in it are relative to the working directory, as in a run's."""

    title: str
    """Heading of the page."""
    text: str = ""
    """What the page should say before anything else."""
    config: Path
    """YAML file of a run: what all runs have in common."""
    set: Keys = {}
    """Keys on top of it, for all runs."""
    eval: Keys = {}
    """Settings of every evaluation; the model is the run's."""
    seeds: tuple[int, ...] = Field((0,), min_length=1)
    """Each run is made once for each seed."""
    baseline: str
    """The run whose tokens are 100 % of every CR."""
    sections: dict[str, StudySection] = Field(min_length=1)
    """Parts of the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRun:
    """One run: its directory, and the settings of its configuration and its evaluation, complete
    except for directories. Equal runs of several sections are made once.
    """

    name: str
    seed: int
    directory: Path
    config: Path
    trains: bool
    settings: Keys
    eval_settings: Keys
    data_problems: int | None
    rounds: int

    @property
    def label(self) -> str:
        """Its name in tables of single runs."""
        return f"{self.name}, seed {self.seed}" if self.seed else self.name

    @property
    def evaluation(self) -> Path:
        """The directory of its evaluation."""
        return self.directory / "eval"

    @property
    def log(self) -> Path:
        """The output of its commands."""
        return self.directory / "log.txt"

    @property
    def is_finished(self) -> bool:
        """Whether the evaluation, which comes last, has written its results."""
        return (self.evaluation / "results.json").is_file()

    @property
    def words(self) -> list[str]:
        """Configuration file and overrides, as `train` takes them. With fixed data, run.dir is the
        directory of the rounds.
        """
        settings = self.settings | {"run.dir": str(self.directory / "train")}
        return [
            str(self.config),
            *(f"{key}={json.dumps(v)}" for key, v in settings.items()),
        ]

    def load(self) -> Config:
        """Its configuration. Errors: `UserError`."""
        return load_config(self.config, self.words[1:])

    def definition(self) -> Keys:
        """What decides its numbers, as JSON."""
        return {
            "config": read_yaml(self.config),
            "train": self.trains,
            "set": self.settings,
            "eval": self.eval_settings,
            "data_problems": self.data_problems,
            "rounds": self.rounds,
            "seed": self.seed,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPlan:
    """rows: section -> name of a row -> its runs, one for each seed. runs: all of them, each once,
    ordered by seed, so that a study that stops early has every row.
    """

    study: Study
    rows: dict[str, dict[str, list[StudyRun]]]
    runs: list[StudyRun]


def read_study(path: Path, out: Path) -> StudyPlan:
    """The plan of a file, whose runs go to `out`. Errors: `UserError` for a file that cannot be
    read, an unknown key, different runs that would share a directory, a baseline that is no run.
    """
    study = load(Study, path)
    runs: dict[str, StudyRun] = {}
    by_directory: dict[Path, StudyRun] = {}

    def once(run: StudyRun) -> StudyRun:
        found = runs.setdefault(str(run.definition()), run)
        other = by_directory.setdefault(found.directory, found)
        if other is not found:
            raise UserError(
                f"{path}: {other.name!r} and {run.name!r} are different runs but would share the "
                f"directory {run.directory.name}; rename one"
            )
        return found

    rows = {
        key: {
            name: [once(run) for run in _expand(study, name, entry or RunEntry(), out)]
            for name, entry in section.runs.items()
        }
        for key, section in study.sections.items()
    }
    if not any(study.baseline in named for named in rows.values()):
        raise UserError(f"{path}: baseline={study.baseline} is not the name of a run")
    in_order = sorted(runs.values(), key=lambda run: run.seed)
    return StudyPlan(study=study, rows=rows, runs=in_order)


def _expand(study: Study, name: str, entry: RunEntry, out: Path) -> Iterator[StudyRun]:
    seeds = dict.fromkeys(entry.seeds or study.seeds)
    settings = {**study.set, **entry.set}
    if not entry.train:
        # What it is asked with, and who judges it: other keys do nothing for it.
        used = {
            "model.path",
            *(f"{section}.{key}" for key, section in SECTIONS.items()),
        }
        if without := sorted(entry.set.keys() - used):
            raise UserError(
                f"run {name!r} is not trained, so leave out set: {without[0]}"
            )
        settings = {key: value for key, value in settings.items() if key in used}
    for seed in seeds if entry.train else [*seeds][:1]:
        folder = re.sub(r"[^A-Za-z0-9.]+", "_", name).strip("_")
        yield StudyRun(
            name=name,
            seed=seed,
            directory=out / "runs" / f"{folder}-s{seed}",
            config=entry.config or study.config,
            trains=entry.train,
            settings=settings | ({"run.seed": seed} if entry.train else {}),
            eval_settings={**study.eval, **entry.eval},
            data_problems=entry.data_problems,
            rounds=entry.rounds,
        )
