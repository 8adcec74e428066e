"""Which problems of an evaluation its model was trained on, by the files of the run that made the
model. Training leaves out what is evaluated; nothing else keeps a user from evaluating the rest.
"""

from dataclasses import replace
from pathlib import Path

from megatron_opsft.commands.evaluate.inputs import Inputs
from megatron_opsft.config import Config
from megatron_opsft.config.load import load
from megatron_opsft.config.run_prompt import find_run
from megatron_opsft.data.mixture import asked, load_training, take_held_out
from megatron_opsft.data.problems import ARITHMETIC, BadRow, ProblemSet
from megatron_opsft.data.sources import FILE_ENDINGS
from megatron_opsft.data.stored_responses import read_stored_responses
from megatron_opsft.errors import UserError, log
from megatron_opsft.run.start.pass_rates import keep_by_pass_rate
from megatron_opsft.run.start.run_directory import RunDir
from megatron_opsft.runtime.durable import json_lines
from megatron_opsft.runtime.libraries import is_cached

_Texts = set[tuple[str, ...]]
"""What problems ask, see `asked`."""


def notes_on_training(inputs: Inputs) -> tuple[str, ...]:
    """Say, for each benchmark, how many of its problems the model was trained on, and warn of it.

    Compares texts as a run does with its held-out problems. () for a model that no run wrote, and
    for a run whose data are no longer as they were. Nothing is fetched. Called by rank 0 alone.
    """
    notes = []
    for run in _runs_of(inputs.settings.model):
        try:
            trained = _trained_texts(run)
        except (UserError, TypeError) as error:  # TypeError: of other bad rows
            log.info(
                "whether %s was trained on these problems is unknown: %s", run, error
            )
            continue
        for benchmark in inputs.benchmarks:
            num_seen = sum(asked(problem) in trained for problem in benchmark.problems)
            if num_seen:
                notes.append(
                    f"{num_seen:,} of {len(benchmark.problems):,} problems of {benchmark.name} are "
                    f"among those that {_shown(run)} was trained on, so its accuracy says nothing "
                    "about new problems"
                )
    for note in notes:
        log.warning(note)
    return tuple(notes)


def _runs_of(model: str) -> list[Path]:
    """Return the run that made a model, the run whose model or adapter that one started from, and
    so on; [] for a model that no run wrote.
    """
    runs: list[Path] = []
    models: list[str | None] = [model]
    while models:
        name = models.pop()
        run = None if name is None else find_run(Path(name).expanduser())
        if run is None or run in runs:
            continue
        runs.append(run)
        try:
            config = load(Config, run / "config.yaml")
        except UserError:
            continue  # which `_trained_texts` reports
        models += [config.model.path, config.model.adapter]
    return runs


def _trained_texts(run: Path) -> _Texts:
    """Return what the problems ask that a run was trained on: its data without the rows that it
    left out, and without those that it held out.

    Errors: `UserError` if the data are not here, or are no longer those of the run.
    """
    config = load(Config, run / "config.yaml")
    data = config.data
    if config.run.steps == 0:
        return set()
    for source in data.sources:
        path = source.path
        is_hub_name = path != ARITHMETIC and not path.endswith(FILE_ENDINGS)
        if is_hub_name and not Path(path).exists() and not is_cached("datasets", path):
            raise UserError(f"{path} is not here")
    training = load_training(data, with_fields=config.verify.own_judge)
    evaluated: set[tuple[str, int]] = set()
    unusable: set[tuple[str, int]] = set()
    for row in json_lines(run / "bad_rows.jsonl"):
        bad_row = BadRow(**row)
        rows = evaluated if bad_row.is_evaluated else unusable
        rows.add((bad_row.source, bad_row.row))
    training = _without(training, unusable)
    if config.eval.holdout:
        training, _ = take_held_out(training, config.eval.holdout, config.run.seed)
    training, _ = keep_by_pass_rate(_without(training, evaluated), data)
    manifest = RunDir(run).read_manifest() or {}
    if training.sha256 != manifest.get("identity", {}).get("data_sha256"):
        raise UserError(
            f"the problems in {data.name} have changed since it was started"
        )
    problems = training.problems
    if data.responses is not None:
        chosen = set(read_stored_responses(data.responses).problem_ids)
        problems = tuple(problem for problem in problems if problem.id in chosen)
    return set(map(asked, problems))


def _without(problem_set: ProblemSet, rows: set[tuple[str, int]]) -> ProblemSet:
    """Return the set without the problems of some rows, given as (source, number)."""
    problems = []
    for problem in problem_set.problems:
        if (problem_set.sources[problem.source_index], problem.row) not in rows:
            problems.append(problem)
    return replace(problem_set, problems=tuple(problems))


def _shown(run: Path) -> str:
    """Return the directory of a run as users write it: from the working directory, if below it."""
    here = Path.cwd()
    return str(run.relative_to(here) if run.is_relative_to(here) else run)
