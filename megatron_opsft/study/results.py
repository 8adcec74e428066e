"""What the runs of a study came to, from their directories alone: table.json, one object a run,
table.md, and the study's page, report.html.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median, pstdev
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
from megatron_opsft.report.tables import Section, plots_of_block, table_of
from megatron_opsft.runtime.durable import write_text
from megatron_opsft.study.jobs import trainings_of
from megatron_opsft.study.study_file import StudyPlan, StudyRun

PHASES = ("rollout", "verify", "reference", "old_logprob", "train", "sync")
_LENGTH = "eval_mean_response_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run of one section: an object of table.json. metrics: overall ones as in results.json,
    with CR to the study's baseline, empty without results; budgets: (token budget, metrics); error:
    why there are no results, in the words of its log.

    training: None for a run that has not trained. seconds: of all steps; phases: median seconds a
    step by phase, in the order of a step; tokens: response tokens learned from; peak_memory_bytes:
    of the rank that had most, None until the run has ended; lengths: (step, mean tokens).
    """

    section: str
    name: str
    settings: dict[str, Any]
    seed: int
    directory: str
    metrics: Metrics = field(default_factory=dict)
    budgets: Sequence[tuple[int, Metrics]] = ()
    training: dict[str, Any] | None = None
    error: str | None = None


def read_rows(out: Path, plan: StudyPlan) -> list[Row]:
    """Rows of the study in `out`, section by section; those of shared runs stand in each."""
    base = [_results(run) for run in plan.runs if run.name == plan.study.baseline]
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
    """Of trainings that follow each other, as one: their steps are counted on."""
    steps: list[dict[str, Any]] = []
    lengths: dict[int, float] = {}
    peaks: list[int] = []
    for directory in directories:
        done = steps[-1]["step"] if steps else 0
        for line in read_json_lines(directory / "evals.jsonl", required=(_LENGTH,)):
            lengths[done + line["step"]] = line[_LENGTH]
        for line in read_json_lines(directory / "metrics.jsonl", required=("step_seconds",)):
            steps.append(line | {"step": done + line["step"]})
        if (directory / "summary.json").is_file():
            peaks.append(read_summary(directory).get("peak_memory_bytes", 0))
    if not steps:
        return None
    return {
        "steps": steps[-1]["step"],
        "seconds": sum(line["step_seconds"] for line in steps),
        "phases": {
            phase: median(line[f"{phase}_seconds"] for line in steps)
            for phase in PHASES
            if f"{phase}_seconds" in steps[-1]
        },
        "tokens": sum(line["trained_tokens"] for line in steps),
        "peak_memory_bytes": max(peaks, default=None),
        "skipped_steps": sum(line["num_accepted"] == 0 for line in steps),
        "lengths": list(lengths.items()),
    }


def _last_words(log: Path) -> str:
    """The last line of a run's log, which says why it ended; paths in it are the run's own."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    said = [line for line in text.split("\n") if line.strip()]
    return said[-1][:300] if said else "not made yet"


def write_outputs(out: Path, plan: StudyPlan, rows: Sequence[Row]) -> None:
    """All files, of the runs that are there."""
    out.mkdir(parents=True, exist_ok=True)
    table = json.dumps(
        [asdict(row) for row in rows], indent=1, allow_nan=False, default=Estimate.model_dump
    )
    write_text(out / "table.json", table + "\n")
    lines = {key: _lines(plan, rows, key) for key in plan.rows}
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
    names = [run.name for run in made]
    compared = [names.index(row.label) for row in base + best if row.label in names]
    write_page(
        out / "report.html",
        [],
        [run.evaluation for run in made],
        title=plan.study.title,
        text=f"{plan.study.text.strip()} {_legend(plan, len(made))}",
        figures=figures_of_rows(base[0], best[0], OVERALL) if base and best else (),
        sections=[_section(plan, rows, key, lines[key]) for key in plan.rows],
        compared=(compared[0], compared[-1]) if compared else (0, -1),
    )


def _legend(plan: StudyPlan, num_made: int) -> str:
    seeds = max(len(runs) for rows in plan.rows.values() for runs in rows.values())
    return (
        f"{num_made} of {len(plan.runs)} runs are finished. CR: mean response tokens over those of "
        f"{plan.study.baseline}; Eff: accuracy / tokens in %. In brackets: 95 % intervals over "
        "problems" + ("; ±: deviation of the seeds." if seeds > 1 else ".")
    )


def _lines(plan: StudyPlan, rows: Sequence[Row], section: str) -> list[TableRow]:
    """A row of the table for each name: means over seeds with their deviation, or one seed's
    intervals; without a block where no run is finished.
    """
    found = []
    for name in plan.rows[section]:
        done = [r for r in rows if (r.section, r.name, r.error) == (section, name, None)]
        metrics = dict(done[0].metrics) if done else {}
        deviations = {}
        if len(done) > 1:
            for metric in metrics:
                values = [row.metrics[metric].value for row in done if metric in row.metrics]
                metrics[metric] = Estimate(value=fmean(values))
                deviations[metric] = pstdev(values)
        blocks = {OVERALL: metrics} if done else {}
        budgets = {OVERALL: done[0].budgets} if done else {}
        found.append(
            TableRow(label=name, blocks=blocks, budgets=budgets, deviations={OVERALL: deviations})
        )
    return found


def _section(plan: StudyPlan, rows: Sequence[Row], key: str, lines: Sequence[TableRow]) -> Section:
    section = plan.study.sections[key]
    own = [row for row in rows if row.section == key]
    errors = {row.name: row.error for row in reversed(own) if row.error}  # of the first seed
    notes = [
        f"{name}: {entry.note}." for name, entry in section.runs.items() if entry and entry.note
    ]
    notes += [f"{name} has no result: {error}." for name, error in errors.items()]
    return Section(
        title=section.title,
        text=" ".join(filter(None, [section.text.strip(), *notes])),
        table=table_of(lines, OVERALL, section.title),
        plots=plots_of_block(lines, OVERALL),
    )
