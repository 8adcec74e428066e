"""A study as a file: runs that are trained and evaluated alike but for what each changes."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from megatron_opsft.config import Config
from megatron_opsft.config.load import load, load_config, read_yaml
from megatron_opsft.config_section import Section
from megatron_opsft.errors import UserError

Keys = dict[str, Any]


def _different(seeds: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(seeds)) < len(seeds):
        raise ValueError("a seed is named twice")
    return seeds


Seeds = Annotated[tuple[int, ...], AfterValidator(_different)]


class RunEntry(Section):
    """What one row of a table changes."""

    train: bool = Field(True, description="false: the model is evaluated as it is.")
    config: Path | None = Field(None, description="YAML file of the run, if not the study's.")
    set: Keys = Field({}, description="Keys of the run's configuration, such as method.name.")
    eval: Keys = Field({}, description="Settings of its evaluation.")
    data_problems: int | None = Field(
        None, ge=1, description="Problems that fixed data are made of; null: all there are."
    )
    rounds: int = Field(
        1, ge=1, description="Fixed data are made so often, run.steps are shared out over them."
    )
    seeds: Seeds | None = Field(None, min_length=1, description="If not the study's.")
    note: str = Field("", description="What a reader of the table should know of it.")


class StudySection(Section):
    """One table and one figure of the page."""

    title: str = Field(..., description="Its heading.")
    text: str = Field("", description="What it asks, in a sentence or two.")
    runs: dict[str, RunEntry | None] = Field(..., min_length=1, description="Name -> what differs.")


class Study(Section):
    """The whole file. Paths in it are relative to the working directory, as in a run's."""

    title: str = Field(..., description="Heading of the page.")
    text: str = Field("", description="What the page should say before anything else.")
    config: Path = Field(..., description="YAML file of a run: what all runs have in common.")
    set: Keys = Field({}, description="Keys on top of it, for all runs.")
    eval: Keys = Field({}, description="Settings of every evaluation; the model is the run's.")
    seeds: Seeds = Field((0,), min_length=1, description="Each run once for each.")
    baseline: str = Field(..., description="The run whose tokens are 100 % of every CR.")
    sections: dict[str, StudySection] = Field(..., min_length=1, description="Parts of the page.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRun:
    """One run to be made; settings are of its configuration and its evaluation, complete but for
    places. Runs of several sections that are the same are made once.
    """

    name: str
    seed: int
    config: Path
    trains: bool
    settings: Keys
    eval_settings: Keys
    data_problems: int | None = None
    rounds: int = 1

    @property
    def label(self) -> str:
        """Its name in tables of single runs."""
        return f"{self.name}, seed {self.seed}" if self.seed else self.name

    @property
    def slug(self) -> str:
        """Its directory's name."""
        words = re.sub(r"[^A-Za-z0-9.]+", "_", self.name).strip("_")
        return f"{words}-s{self.seed}"

    @property
    def overrides(self) -> list[str]:
        """`section.key=value`, as `train` takes them."""
        return [f"{key}={json.dumps(value)}" for key, value in self.settings.items()]

    def load(self, overrides: Sequence[str] = ()) -> Config:
        """Its configuration. Errors: `UserError`."""
        return load_config(self.config, [*self.overrides, *overrides])

    @property
    def method(self) -> str:
        """What makes its answers shorter: of training, or of the evaluation."""
        if self.trains:
            return self.load().method.name
        method = self.eval_settings.get("method", "sample")
        return str(method if method != "sample" else self.eval_settings.get("template", "r1"))

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
    """rows: section -> name of a row -> its runs, a seed each; runs: all of them, each once, by
    seed, so that a study that is stopped early has all rows.
    """

    study: Study
    rows: dict[str, dict[str, list[StudyRun]]]
    runs: list[StudyRun]

    def of(self, section: str) -> list[StudyRun]:
        """A section's runs, some of which other sections may show too."""
        return [run for runs in self.rows[section].values() for run in runs]


def read_study(path: Path) -> StudyPlan:
    """Errors: `UserError` for a file that cannot be read, an unknown key, names that mean several
    runs, and a baseline that is no run.
    """
    study = load(Study, path)
    rows: dict[str, dict[str, list[StudyRun]]] = {}
    runs: dict[str, StudyRun] = {}
    for key, section in study.sections.items():
        rows[key] = {}
        for name, entry in section.runs.items():
            rows[key][name] = []
            for run in _expand(study, name, entry or RunEntry()):
                first = runs.setdefault(str(run.definition()), run)
                rows[key][name].append(first)
    _check_names(path, runs.values())
    if study.baseline not in {run.name for run in runs.values()}:
        raise UserError(f"{path}: baseline={study.baseline} is the name of no run")
    in_order = sorted(runs.values(), key=lambda run: run.seed)
    return StudyPlan(study=study, rows=rows, runs=in_order)


def _expand(study: Study, name: str, entry: RunEntry) -> Iterator[StudyRun]:
    seeds = entry.seeds or study.seeds
    for seed in seeds if entry.train else seeds[:1]:
        yield StudyRun(
            name=name,
            seed=seed,
            config=entry.config or study.config,
            trains=entry.train,
            settings={**study.set, **entry.set, "run.seed": seed} if entry.train else {},
            eval_settings={**study.eval, **entry.eval},
            data_problems=entry.data_problems,
            rounds=entry.rounds,
        )


def _check_names(path: Path, runs: Iterable[StudyRun]) -> None:
    slugs: dict[str, StudyRun] = {}
    for run in runs:
        other = slugs.setdefault(run.slug, run)
        if other is not run:
            raise UserError(
                f"{path}: {other.name!r} and {run.name!r} are different runs but would share the "
                f"directory {run.slug}; rename one"
            )
