"""The results of a study, read from the directories of its runs, and the two files beside these
directories from which they are read again: study.json (what the study's file said) and table.json
(one object for each run).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megatron_opsft.commands.evaluate.results import (
    MeasuredSamples,
    first_fault,
    paired_differences,
    read_results,
)
from megatron_opsft.commands.report.table import OVERALL, Estimate, Metrics, Size
from megatron_opsft.commands.study.directory import STUDY, TABLE
from megatron_opsft.commands.study.jobs import trainings_of
from megatron_opsft.commands.study.study_file import Study, StudyPlan, StudyRun
from megatron_opsft.data.stored_samples import SampleFiles
from megatron_opsft.errors import UserError
from megatron_opsft.records import JsonObject, record
from megatron_opsft.run.run_files import read_json_lines, read_summary
from megatron_opsft.runtime.durable import write_text

_AGAIN = "`megatron-opsft study FILE --out {} --page` writes it again"


@record
class StudyRow:
    """One run in one section of the study: an object of table.json."""

    section: str
    """Key of the section."""
    name: str
    """Name of the run in the section, the same for all seeds."""
    settings: JsonObject
    seed: int
    directory: str
    """Directory of the run, relative to the study's."""
    metrics: Metrics
    """Overall metrics of results.json, with CR to the study's baseline; empty without results."""
    budgets: Sequence[tuple[int, Metrics]]
    """(Token budget, overall metrics)."""
    size: Size | None
    """Problems and responses that the metrics rest on."""
    training: JsonObject | None
    """steps, their seconds, and peak_memory_bytes of the rank that needed most (None until the
    training has ended); None if the run has not trained.
    """
    error: str | None
    """Why there are no results, as the run's log says."""
    differences: Mapping[str, Metrics] = field(default_factory=dict)
    """Name of another row, the baseline or the study's subject -> accuracy and mean_tokens of this
    row's name minus that one's, paired; the same for all seeds of a name.
    """


def read_study_rows(out: Path, plan: StudyPlan) -> list[StudyRow]:
    """Read the rows of the study in `out`, section by section; a run of several sections has a row
    in each.

    Errors: `UserError` for results or samples that cannot be read.
    """
    base_tokens = []
    for runs_by_name in plan.rows.values():
        for run in runs_by_name.get(plan.study.baseline, ()):
            if run.is_finished:
                metrics = read_results(run.evaluation).overall.metrics
                base_tokens.append(metrics["mean_tokens"].value)
    mean_base_tokens = fmean(base_tokens) if base_tokens else None
    rows = []
    for section, runs_by_name in plan.rows.items():
        for name, runs in runs_by_name.items():
            rows += [
                _read_row(out, section, name, run, mean_base_tokens) for run in runs
            ]
    differences = _read_differences(plan, subject_of(plan.study, rows))
    return [
        replace(row, differences=differences[row.section, row.name]) for row in rows
    ]


def subject_of(study: Study, rows: Sequence[StudyRow]) -> str | None:
    """Return the name of the run that the study is about: the first one of the first section that
    the title names, or the most efficient finished one if it names none; None without any.
    """
    first, section = next(iter(study.sections.items()))
    title = study.title.casefold()
    others = [name for name in section.runs if name != study.baseline]
    named = [name for name in others if name.casefold() in title]
    if named:
        # Of names that begin at the same place, one is the beginning of the other.
        return min(named, key=lambda name: (title.find(name.casefold()), -len(name)))
    efficiencies: dict[str, list[float]] = {}
    for row in rows:
        if row.section == first and row.name in others and row.error is None:
            values = efficiencies.setdefault(row.name, [])
            values.append(row.metrics["efficiency"].value)
    means = {name: fmean(values) for name, values in efficiencies.items()}
    return max(means, key=means.__getitem__, default=None)


def _read_differences(
    plan: StudyPlan, subject: str | None
) -> dict[tuple[str, str], dict[str, Metrics]]:
    """Return (section, name) -> `StudyRow.differences`, from the samples of finished runs."""
    measured = {
        run.directory: _read_samples(run.evaluation)
        for run in plan.runs
        if run.is_finished
    }
    references: dict[str, list[StudyRun]] = {}
    for runs_by_name in plan.rows.values():
        for name in (plan.study.baseline, subject):
            if name in runs_by_name:
                references.setdefault(name, runs_by_name[name])
    found: dict[tuple[str, str], dict[str, Metrics]] = {}
    for section, runs_by_name in plan.rows.items():
        for name, runs in runs_by_name.items():
            of_row = found.setdefault((section, name), {})
            for reference, others in references.items():
                pairs = [
                    (measured[run.directory], measured[other.directory])
                    for run, other in product(runs, others)
                    if _are_paired(run, other)
                    and {run.directory, other.directory} <= measured.keys()
                ]
                if pairs:
                    of_row[reference] = paired_differences(pairs)
    return found


def _are_paired(run: StudyRun, other: StudyRun) -> bool:
    """True for two different runs of one seed; a model that is not trained goes with every seed."""
    if run.directory == other.directory:
        return False
    return run.seed == other.seed or not (run.trains and other.trains)


def _read_samples(evaluation: Path) -> MeasuredSamples:
    """Measure the samples of a finished evaluation, those that its results rest on.

    Errors: `UserError`.
    """
    files = SampleFiles(evaluation)
    samples = {}
    results = read_results(evaluation).benchmarks
    for name in results.keys() & set(files.complete()):
        samples[name] = [
            sample
            for sample in files.read(name)
            if sample.sample_index < results[name].samples_per_problem
        ]
    try:
        return MeasuredSamples.of(samples)
    except ValueError as error:
        raise UserError(f"{evaluation}: {error}; evaluate the run again") from None


def _read_row(
    out: Path, section: str, name: str, run: StudyRun, base_tokens: float | None
) -> StudyRow:
    """Read one row. base_tokens: mean response tokens of the baseline, if it is finished."""
    metrics: dict[str, Estimate] = {}
    budgets: list[tuple[int, Metrics]] = []
    size = error = None
    if run.is_finished:
        results = read_results(run.evaluation)
        size = results.size(OVERALL)
        budgets = [(point.budget, point.metrics) for point in results.overall.budgets]
        metrics = dict(results.overall.metrics)
        metrics.pop("compression_ratio", None)  # to another baseline
        if base_tokens:
            ratio = metrics["mean_tokens"].value / base_tokens
            metrics["compression_ratio"] = Estimate(value=ratio)
    else:
        error = _last_line(run.log)
    return StudyRow(
        section=section,
        name=name,
        settings={
            "train": run.settings,
            "eval": run.eval_settings,
            "data_problems": run.data_problems,
            "rounds": run.rounds,
        },
        seed=run.seed,
        directory=str(run.directory.relative_to(out)),
        metrics=metrics,
        budgets=budgets,
        size=size,
        training=_read_trainings(trainings_of(run)),
        error=error,
    )


def _read_trainings(directories: Sequence[Path]) -> JsonObject | None:
    """Read `StudyRow.training` of trainings that follow each other and count as one."""
    seconds: list[float] = []
    peaks: list[int] = []
    for directory in directories:
        lines = read_json_lines(directory / "metrics.jsonl", required=("step_seconds",))
        seconds += [line["step_seconds"] for line in lines]
        summary = read_summary(directory)
        if summary:
            peaks.append(summary.get("peak_memory_bytes", 0))
    if not seconds:
        return None
    peak = max(peaks, default=None)
    return {"steps": len(seconds), "seconds": sum(seconds), "peak_memory_bytes": peak}


def _last_line(log: Path) -> str:
    """Return the last line of a run's log, which says why the run ended."""
    if log.is_file():
        text = log.read_text(encoding="utf-8", errors="replace")
        for line in reversed(text.split("\n")):
            if line.strip():
                return line[:300]
    return "not made yet"


def write_results(out: Path, study: Study, rows: Sequence[StudyRow]) -> None:
    """Write study.json and table.json, which `read_written` reads."""
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / STUDY, study.model_dump_json(indent=1) + "\n")
    table = json.dumps(
        [asdict(row) for row in rows],
        indent=1,
        allow_nan=False,
        default=Estimate.model_dump,
    )
    write_text(out / TABLE, table + "\n")


def read_written(out: Path) -> tuple[Study, list[StudyRow]]:
    """Read what `write_results` has written; the runs themselves are not read.

    Errors: `UserError` with file and field for what is missing, damaged, or of an earlier version.
    """
    study = _read(out / STUDY, Study)
    rows = _read(out / TABLE, list[StudyRow])
    if not {row.section for row in rows} <= study.sections.keys():
        raise UserError(
            f"{out / TABLE}: not of the sections in {STUDY}; {_AGAIN.format(out)}"
        )
    return study, rows


def _read(path: Path, kind: Any) -> Any:
    """Read JSON of a type. Errors: `UserError`."""
    again = _AGAIN.format(path.parent)
    if not path.is_file():
        raise UserError(f"{path}: not found; {again}")
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except ValidationError as error:
        raise UserError(f"{path}: {first_fault(error, 'file')}; {again}") from None
