"""What the runs of a study came to, from their directories alone: table.json, one object a run."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from megatron_opsft.evaluate.results import BlockResults, read_results
from megatron_opsft.report.lines import read_json_lines
from megatron_opsft.report.runs import read_summary
from megatron_opsft.report.table import Estimate, Metrics
from megatron_opsft.study.jobs import trainings_of
from megatron_opsft.study.study_file import StudyPlan, StudyRun

PHASES = ("rollout", "verify", "reference", "old_logprob", "train", "sync")
_LENGTH = "eval_mean_response_tokens"
CONVERGED_WITHIN = 0.1  # of the last evaluation's length, and ever after


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Of a run that trains. seconds: of all steps; phases: median seconds a step by phase, in the
    order of a step; tokens: response tokens learned from; peak_memory_bytes: of the rank that had
    most, None until the run has ended; converged: (step, seconds) of the first evaluation from
    which on the mean length stays within 10 % of the last one's; lengths: (step, mean tokens).
    """

    steps: int
    seconds: float
    phases: dict[str, float]
    tokens: int
    peak_memory_bytes: int | None
    converged_step: int | None
    converged_seconds: float | None
    skipped_steps: int
    lengths: list[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run of one section. metrics: overall ones as in results.json, with CR to the study's
    baseline, empty without results; budgets: (token budget, metrics); error: why there are no
    results, in the words of its log.
    """

    section: str
    name: str
    method: str
    settings: dict[str, Any]
    seed: int
    directory: str
    metrics: Metrics = field(default_factory=dict)
    budgets: Sequence[tuple[int, Metrics]] = ()
    training: Training | None = None
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
        method=run.method,
        settings={
            "train": run.settings,
            "eval": run.eval_settings,
            "data_problems": run.data_problems,
            "rounds": run.rounds,
        },
        seed=run.seed,
        directory=str(run.directory.relative_to(out)),
        metrics=metrics,
        budgets=[(at.budget, at.metrics) for at in results.budgets] if results else (),
        training=_read_training(trainings_of(run)),
        error=None if results else _last_words(run.log),
    )


def _read_training(directories: Sequence[Path]) -> Training | None:
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
    converged = converged_at(list(lengths.items()))
    until = [line["step_seconds"] for line in steps if line["step"] <= (converged or 0)]
    return Training(
        steps=steps[-1]["step"],
        seconds=sum(line["step_seconds"] for line in steps),
        phases={
            phase: median(line[f"{phase}_seconds"] for line in steps)
            for phase in PHASES
            if f"{phase}_seconds" in steps[-1]
        },
        tokens=sum(line["trained_tokens"] for line in steps),
        peak_memory_bytes=max(peaks, default=None),
        converged_step=converged,
        converged_seconds=None if converged is None else sum(until),
        skipped_steps=sum(line["num_accepted"] == 0 for line in steps),
        lengths=list(lengths.items()),
    )


def converged_at(lengths: Sequence[tuple[int, float]]) -> int | None:
    """The step from which on every evaluation's length is near the last one's; None without two
    evaluations. lengths: (step, mean response tokens), ascending.
    """
    if len(lengths) < 2:
        return None
    first, last = lengths[-1]
    for step, tokens in reversed(lengths):
        if abs(tokens - last) > CONVERGED_WITHIN * last:
            break
        first = step
    return first


def _last_words(log: Path) -> str:
    """The last line of a run's log, which says why it ended; paths in it are the run's own."""
    if not log.is_file():
        return "not made yet"
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    said = [line for line in lines if line.strip()]
    return said[-1][:300] if said else "it said nothing"


def to_json(rows: Sequence[Row]) -> str:
    """The text of table.json."""
    found = [asdict(row) for row in rows]
    return json.dumps(found, indent=1, allow_nan=False, default=Estimate.model_dump) + "\n"
