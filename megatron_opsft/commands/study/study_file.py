"""The file of a study: runs trained and evaluated alike, except for what each one changes."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from megatron_opsft.config import Config
from megatron_opsft.config.load import load, load_config, read_yaml
from megatron_opsft.config.run_prompt import SECTIONS
from megatron_opsft.errors import UserError
from megatron_opsft.records import record
from megatron_opsft.section import Section

Keys = dict[str, Any]


class RunEntry(Section):
    """Settings of one row of a table: what it changes in those of the study."""

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
    """Seeds of the row, if not the study's."""
    note: str = ""
    """What a reader of the table should know about it."""


class StudySection(Section):
    """One table and one figure of the page."""

    title: str
    """Heading of the section."""
    text: str = ""
    """The question of the section, in a sentence or two."""
    runs: dict[str, RunEntry | None] = Field(min_length=1)
    """Name of a row -> what it changes; null: nothing."""


class Study(Section):
    """The whole file. Paths in it are relative to the working directory, as in a run's file."""

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


@record
class StudyRun:
    """One run of the study. Equal runs of several sections are made once."""

    name: str
    seed: int
    directory: Path
    config: Path
    """YAML file of the run."""
    trains: bool
    """False: the model is evaluated as it is."""
    settings: Keys
    """All keys on top of `config`, except for run.dir."""
    eval_settings: Keys
    """All settings of the evaluation, except for model, name and out."""
    data_problems: int | None
    rounds: int

    @property
    def label(self) -> str:
        """Name and seed, as of `run_label`."""
        return run_label(self.name, self.seed)

    @property
    def evaluation(self) -> Path:
        """The directory of the run's evaluation."""
        return self.directory / "eval"

    @property
    def log(self) -> Path:
        """The output of the run's commands."""
        return self.directory / "log.txt"

    @property
    def is_finished(self) -> bool:
        """True if the evaluation, which comes last, has written its results."""
        return (self.evaluation / "results.json").is_file()

    @property
    def words(self) -> list[str]:
        """Configuration file and overrides, as `train` takes them.

        run.dir is `train/`: the run itself, or for a method with fixed data the parent of its
        rounds (`launch.rounds`).
        """
        settings = self.settings | {"run.dir": str(self.directory / "train")}
        overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        return [str(self.config), *overrides]

    def load(self) -> Config:
        """Load the run's configuration. Errors: `UserError`."""
        return load_config(self.config, self.words[1:])

    def definition(self) -> Keys:
        """Return, as JSON, all that decides the run's numbers."""
        return {
            "config": read_yaml(self.config),
            "train": self.trains,
            "set": self.settings,
            "eval": self.eval_settings,
            "data_problems": self.data_problems,
            "rounds": self.rounds,
            "seed": self.seed,
        }


def run_label(name: str, seed: int) -> str:
    """Return what tables of single runs call a run."""
    return f"{name}, seed {seed}" if seed else name


@record
class StudyPlan:
    """A study and all of its runs."""

    study: Study
    rows: dict[str, dict[str, list[StudyRun]]]
    """Section -> name of a row -> its runs, one for each seed."""
    runs: list[StudyRun]
    """Each run once, ordered by seed, so that a study that stops early has every row."""


def read_study(path: Path, out: Path) -> StudyPlan:
    """Read the plan of a study's file; its runs go to `out`.

    Errors: `UserError` for a file that cannot be read, an unknown key, different runs that would
    share a directory, a baseline that is no run.
    """
    study = load(Study, path)
    by_definition: dict[str, StudyRun] = {}
    by_directory: dict[Path, StudyRun] = {}

    def register(run: StudyRun) -> StudyRun:
        """Add a run and return it, or return the equal one that was added before.

        Errors: `UserError` if a different run has its directory.
        """
        registered = by_definition.setdefault(str(run.definition()), run)
        owner = by_directory.setdefault(registered.directory, registered)
        if owner is not registered:
            raise UserError(
                f"{path}: {owner.name!r} and {run.name!r} are different runs but would "
                f"share the directory {run.directory.name}; rename one"
            )
        return registered

    rows: dict[str, dict[str, list[StudyRun]]] = {}
    for key, section in study.sections.items():
        rows[key] = {}
        for name, entry in section.runs.items():
            entry_runs = _expand(study, name, entry or RunEntry(), out)
            rows[key][name] = [register(run) for run in entry_runs]
    if not any(study.baseline in by_name for by_name in rows.values()):
        raise UserError(f"{path}: baseline={study.baseline} is not the name of a run")
    in_order = sorted(by_definition.values(), key=lambda run: run.seed)
    return StudyPlan(study=study, rows=rows, runs=in_order)


def _expand(study: Study, name: str, entry: RunEntry, out: Path) -> Iterator[StudyRun]:
    """Yield the runs of a row, one for each seed; a model that is not trained has the first alone.

    Errors: `UserError`.
    """
    settings = study.set | entry.set
    seeds = list(dict.fromkeys(entry.seeds or study.seeds))
    if not entry.train:
        # The model, how it is asked, and who judges it: other keys do nothing for it.
        used = {f"{section}.{key}" for key, section in SECTIONS.items()}
        used.add("model.path")
        unused = sorted(entry.set.keys() - used)
        if unused:
            raise UserError(
                f"run {name!r} is not trained, so leave out set: {unused[0]}"
            )
        settings = {key: value for key, value in settings.items() if key in used}
        seeds = seeds[:1]
    folder = re.sub(r"[^A-Za-z0-9.]+", "_", name).strip("_")
    for seed in seeds:
        yield StudyRun(
            name=name,
            seed=seed,
            directory=out / "runs" / f"{folder}-s{seed}",
            config=entry.config or study.config,
            trains=entry.train,
            settings=settings | {"run.seed": seed} if entry.train else settings,
            eval_settings=study.eval | entry.eval,
            data_problems=entry.data_problems,
            rounds=entry.rounds,
        )
