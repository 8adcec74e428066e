"""The results of a study, read from the directories of its runs, and the two files beside these
directories from which they are read again: study.json (what the study's file said) and table.json
(one object for each run).
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megatron_opsft.commands.evaluate.results import first_fault, read_results
from megatron_opsft.commands.report.table import OVERALL, Estimate, Metrics, Size
from megatron_opsft.commands.study.directory import STUDY, TABLE
from megatron_opsft.commands.study.jobs import trainings_of
from megatron_opsft.commands.study.study_file import Study, StudyPlan, StudyRun
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


def read_study_rows(out: Path, plan: StudyPlan) -> list[StudyRow]:
    """Read the rows of the study in `out`, section by section; a run of several sections has a row
    in each.
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
    return rows


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
