"""The results of a study: read from the directories of its runs; and in two files beside them,
study.json (what its file said) and table.json (one object for each run), from which they are read
again.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megatron_opsft.commands.evaluate.results import Results, read_results
from megatron_opsft.commands.report.table import OVERALL, Estimate, Metrics, Size
from megatron_opsft.commands.study.directory import STUDY, TABLE
from megatron_opsft.commands.study.jobs import trainings_of
from megatron_opsft.commands.study.study_file import Study, StudyPlan, StudyRun
from megatron_opsft.errors import UserError
from megatron_opsft.run.run_files import read_json_lines, read_summary
from megatron_opsft.runtime.durable import write_text

_AGAIN = "`megatron-opsft study FILE --out {} --page` writes it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run of one section: an object of table.json.

    metrics: the overall ones of results.json, with CR to the study's baseline; empty without
    results. budgets: (token budget, metrics). size: problems and responses that they rest on.
    error: why there are no results, as the run's log says. training: steps, their seconds, and
    peak_memory_bytes of the rank that needed most (None until the training has ended); None if the
    run has not trained.
    """

    section: str
    name: str
    settings: dict[str, Any]
    seed: int
    directory: str
    metrics: Metrics
    budgets: Sequence[tuple[int, Metrics]]
    size: Size | None
    training: dict[str, Any] | None
    error: str | None


def read_rows(out: Path, plan: StudyPlan) -> list[Row]:
    """The rows of the study in `out`, section by section; a shared run has a row in each."""
    named = [rows.get(plan.study.baseline, ()) for rows in plan.rows.values()]
    base = [_results(run) for runs in named for run in runs]
    tokens = [found.overall.metrics["mean_tokens"].value for found in base if found]
    return [
        _read_row(out, section, name, run, fmean(tokens) if tokens else None)
        for section, rows in plan.rows.items()
        for name, runs in rows.items()
        for run in runs
    ]


def _results(run: StudyRun) -> Results | None:
    return read_results(run.evaluation) if run.is_finished else None


def _read_row(
    out: Path, section: str, name: str, run: StudyRun, base: float | None
) -> Row:
    results = _results(run)
    metrics = dict(results.overall.metrics) if results else {}
    metrics.pop("compression_ratio", None)  # to another baseline
    if metrics and base:
        ratio = metrics["mean_tokens"].value / base
        metrics["compression_ratio"] = Estimate(value=ratio)
    return Row(
        section=section,
        name=name,
        settings={"train": run.settings, "eval": run.eval_settings}
        | {"data_problems": run.data_problems, "rounds": run.rounds},
        seed=run.seed,
        directory=str(run.directory.relative_to(out)),
        metrics=metrics,
        budgets=[(at.budget, at.metrics) for at in results.overall.budgets]
        if results
        else (),
        size=results.size(OVERALL) if results else None,
        training=_read_training(trainings_of(run)),
        error=None if results else _last_words(run.log),
    )


def _read_training(directories: Sequence[Path]) -> dict[str, Any] | None:
    """Of trainings that follow each other, counted as one."""
    seconds: list[float] = []
    peaks: list[int] = []
    for directory in directories:
        lines = read_json_lines(directory / "metrics.jsonl", required=("step_seconds",))
        seconds += [line["step_seconds"] for line in lines]
        if summary := read_summary(directory):
            peaks.append(summary.get("peak_memory_bytes", 0))
    if not seconds:
        return None
    peak = max(peaks, default=None)
    return {"steps": len(seconds), "seconds": sum(seconds), "peak_memory_bytes": peak}


def _last_words(log: Path) -> str:
    """The last line of a run's log, which says why it ended; paths in it are the run's own."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    said = [line for line in text.split("\n") if line.strip()]
    return said[-1][:300] if said else "not made yet"


def write_results(out: Path, study: Study, rows: Sequence[Row]) -> None:
    """study.json and table.json, from which `read_written` has them again."""
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / STUDY, study.model_dump_json(indent=1) + "\n")
    table = json.dumps(
        [asdict(row) for row in rows],
        indent=1,
        allow_nan=False,
        default=Estimate.model_dump,
    )
    write_text(out / TABLE, table + "\n")


def read_written(out: Path) -> tuple[Study, list[Row]]:
    """What `write_results` has written; the runs themselves are not read. Errors: `UserError` with
    file and field for what is missing, damaged, or of an earlier version.
    """
    study = _read(out / STUDY, TypeAdapter(Study))
    rows = _read(out / TABLE, TypeAdapter(list[Row]))
    if not {row.section for row in rows} <= study.sections.keys():
        raise UserError(
            f"{out / TABLE}: not of the sections in {STUDY}; {_AGAIN.format(out)}"
        )
    return study, rows


def _read(path: Path, kind: TypeAdapter[Any]) -> Any:
    again = _AGAIN.format(path.parent)
    if not path.is_file():
        raise UserError(f"{path}: not found; {again}")
    try:
        return kind.validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "file"
        raise UserError(f"{path}: {field}: {first['msg']}; {again}") from None
