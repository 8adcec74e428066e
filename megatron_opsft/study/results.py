"""The results of a study, read from the directories of its runs: table.json with one object for
each run, table.md, and the study's page, report.html.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from megatron_opsft.evaluate.results import BlockResults, read_results
from megatron_opsft.report.page import figures_of_rows, write_page
from megatron_opsft.report.runs import read_json_lines, read_summary
from megatron_opsft.report.table import (
    OVERALL,
    Estimate,
    Metrics,
    TableRow,
    escape_markdown,
    markdown_table,
)
from megatron_opsft.report.tables import Section, section_of
from megatron_opsft.runtime.durable import write_text
from megatron_opsft.study.jobs import trainings_of
from megatron_opsft.study.study_file import StudyPlan, StudyRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run of one section: an object of table.json.

    metrics: the overall ones of results.json, with CR to the study's baseline; empty without
    results. budgets: (token budget, metrics). error: why there are no results, as the run's log
    says. training: steps, their seconds, and peak_memory_bytes of the rank that needed most (None
    until the training has ended); None if the run has not trained.
    """

    section: str
    name: str
    settings: dict[str, Any]
    seed: int
    directory: str
    metrics: Metrics
    budgets: Sequence[tuple[int, Metrics]]
    training: dict[str, Any] | None
    error: str | None


def read_rows(out: Path, plan: StudyPlan) -> list[Row]:
    """The rows of the study in `out`, section by section; a shared run has a row in each."""
    named = [rows.get(plan.study.baseline, ()) for rows in plan.rows.values()]
    base = [_results(run) for runs in named for run in runs]
    tokens = [found.metrics["mean_tokens"].value for found in base if found]
    return [
        _read_row(out, section, name, run, fmean(tokens) if tokens else None)
        for section, rows in plan.rows.items()
        for name, runs in rows.items()
        for run in runs
    ]


def _results(run: StudyRun) -> BlockResults | None:
    return read_results(run.evaluation).overall if run.is_finished else None


def _read_row(out: Path, section: str, name: str, run: StudyRun, base: float | None) -> Row:
    results = _results(run)
    metrics = dict(results.metrics) if results else {}
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
        budgets=[(at.budget, at.metrics) for at in results.budgets] if results else (),
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


def write_outputs(out: Path, plan: StudyPlan, rows: Sequence[Row]) -> None:
    """Write all files, from the finished runs."""
    out.mkdir(parents=True, exist_ok=True)
    table = json.dumps(
        [asdict(row) for row in rows], indent=1, allow_nan=False, default=Estimate.model_dump
    )
    write_text(out / "table.json", table + "\n")
    lines = {key: table_rows(plan, rows, key) for key in plan.rows}
    tables = [
        f"## {escape_markdown(section.title)}\n\n"
        + markdown_table(lines[key], [OVERALL], intervals=True)
        for key, section in plan.study.sections.items()
    ]
    write_text(out / "table.md", "\n".join(tables))
    made = [run for run in plan.runs if run.is_finished]
    done = [row for row in next(iter(lines.values())) if row.blocks]
    base = [row for row in done if row.label == plan.study.baseline]
    others = [row for row in done if row.label != plan.study.baseline]
    best = sorted(others, key=lambda row: -row.blocks[OVERALL]["efficiency"].value)[:1]
    last = best[0].label if best else ""
    made.sort(key=lambda run: (run.name != plan.study.baseline) + (run.name == last))
    write_page(
        out / "report.html",
        [],
        {run.label: run.evaluation for run in made},
        title=plan.study.title,
        text=f"{plan.study.text.strip()} {_legend(plan, len(made))}",
        figures=figures_of_rows(base[0], best[0], OVERALL) if base and best else (),
        sections=[_section(plan, rows, key, lines[key]) for key in plan.rows],
    )


def _legend(plan: StudyPlan, num_made: int) -> str:
    seeds = max(len(runs) for rows in plan.rows.values() for runs in rows.values())
    return (
        f"{num_made} of {len(plan.runs)} runs are finished. CR: mean response tokens over those of "
        f"{plan.study.baseline}; Eff: accuracy / tokens in %. In brackets: 95 % intervals over "
        "problems" + ("; ±: deviation of the seeds." if seeds > 1 else ".")
    )


def table_rows(plan: StudyPlan, rows: Sequence[Row], section: str) -> list[TableRow]:
    """A row of the table for each name: means over seeds with their deviation, or one seed's
    intervals; without a block where no run is finished.
    """
    found = []
    for name in plan.rows[section]:
        done = [r for r in rows if (r.section, r.name, r.error) == (section, name, None)]
        if not done:
            found.append(TableRow(label=name, blocks={}))
            continue
        metrics, deviations = _means([row.metrics for row in done])
        budgets = [
            (points[0][0], _means([at for _, at in points])[0])
            for points in zip(*(row.budgets for row in done), strict=True)
        ]
        found.append(
            TableRow(
                label=name,
                blocks={OVERALL: metrics},
                budgets={OVERALL: budgets},
                deviations={OVERALL: deviations},
            )
        )
    return found


def _means(found: Sequence[Metrics]) -> tuple[Metrics, dict[str, float]]:
    """The mean of each metric over seeds, and the standard deviation of the sample (over n - 1); of
    one seed its own metrics, with intervals.
    """
    if len(found) == 1:
        return found[0], {}
    values = {m: [each[m].value for each in found if m in each] for m in found[0]}
    means = {metric: Estimate(value=fmean(those)) for metric, those in values.items()}
    return means, {metric: stdev(those) for metric, those in values.items() if len(those) > 1}


def _section(plan: StudyPlan, rows: Sequence[Row], key: str, lines: Sequence[TableRow]) -> Section:
    section = plan.study.sections[key]
    own = [row for row in rows if row.section == key]
    errors = {row.name: row.error for row in reversed(own) if row.error}  # of the first seed
    notes = [
        f"{name}: {entry.note}." for name, entry in section.runs.items() if entry and entry.note
    ]
    notes += [f"{name} has no result: {error}." for name, error in errors.items()]
    text = " ".join(filter(None, [section.text.strip(), *notes]))
    return section_of(lines, OVERALL, section.title, text)
