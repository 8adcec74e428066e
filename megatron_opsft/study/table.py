"""What the runs of a study came to, from their directories alone: table.json, one object a run."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

from megatron_opsft.evaluate.results import BudgetPoint, read_results
from megatron_opsft.report.curves import read_summary
from megatron_opsft.report.estimate import Estimate
from megatron_opsft.report.lines import read_json_lines
from megatron_opsft.runtime.durable import write_text
from megatron_opsft.study.jobs import RunFiles, files_of, trainings_of
from megatron_opsft.study.study_file import StudyPlan, StudyRun

PHASES = ("rollout", "verify", "reference", "old_logprob", "train", "sync")
_LENGTH = "eval_mean_response_tokens"
CONVERGED_WITHIN = 0.1  # of the last evaluation's length, and ever after


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Of a run that trains. seconds: of all steps; phases: median seconds a step by phase, in the
    order of a step; tokens: response tokens learned from; peak_memory_bytes: of the rank that had
    most, None until the run has ended; converged: (step, seconds) of the first evaluation from
    which on the mean length stays within 10 % of the last one's.
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
class AtBudget:
    """What an evaluation would have been with so many tokens for a response."""

    budget: int
    accuracy: float
    tokens: float
    norm_std: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run of one section. accuracy, pass_at_n, compression_ratio: shares; tokens: mean of a
    response; the intervals are of 95 % over problems; seconds: of all training steps; error: why
    it has no results, in the words of its log.
    """

    section: str
    name: str
    method: str
    settings: dict[str, Any]
    seed: int
    directory: str
    accuracy: float | None = None
    accuracy_interval: tuple[float, float] | None = None
    pass_at_n: float | None = None
    tokens: float | None = None
    tokens_interval: tuple[float, float] | None = None
    compression_ratio: float | None = None
    efficiency: float | None = None
    norm_std: float | None = None
    norm_std_interval: tuple[float, float] | None = None
    budgets: tuple[AtBudget, ...] = ()
    seconds: float = 0.0
    training: Training | None = None
    error: str | None = None


def read_rows(out: Path, plan: StudyPlan) -> list[Row]:
    """Rows of the study in `out`, section by section; those of shared runs stand in each."""
    base = _mean_tokens(out, [r for r in plan.runs if r.name == plan.study.baseline])
    return [
        _read_row(out, section, name, run, base)
        for section, rows in plan.rows.items()
        for name, runs in rows.items()
        for run in runs
    ]


def write_table(path: Path, rows: Sequence[Row]) -> None:
    """table.json"""
    write_text(path, json.dumps([asdict(row) for row in rows], indent=1, allow_nan=False) + "\n")


def _mean_tokens(out: Path, runs: Sequence[StudyRun]) -> float | None:
    done = [files for run in runs if (files := files_of(out, run)).is_finished]
    values = [read_results(f.evaluation).overall.metrics["mean_tokens"].value for f in done]
    return fmean(values) if values else None


def _read_row(out: Path, section: str, name: str, run: StudyRun, base: float | None) -> Row:
    files = files_of(out, run)
    facts: dict[str, Any] = {
        "section": section,
        "name": name,
        "method": run.method,
        "settings": {
            "train": run.settings,
            "eval": run.eval_settings,
            "data_problems": run.data_problems,
            "rounds": run.rounds,
        },
        "seed": run.seed,
        "directory": str(files.directory.relative_to(out)),
        "training": _read_training(trainings_of(run, files)),
    }
    if facts["training"] is not None:
        facts["seconds"] = facts["training"].seconds
    if not files.is_finished:
        return Row(**facts, error=_last_words(files))
    overall = read_results(files.evaluation).overall
    found = overall.metrics
    accuracy, tokens, norm_std = found["accuracy"], found["mean_tokens"], found.get("norm_std")
    return Row(
        **facts,
        accuracy=accuracy.value,
        accuracy_interval=_interval(accuracy),
        pass_at_n=found["pass_at_n"].value,
        tokens=tokens.value,
        tokens_interval=_interval(tokens),
        compression_ratio=tokens.value / base if base else None,
        efficiency=found["efficiency"].value,
        norm_std=None if norm_std is None else norm_std.value,
        norm_std_interval=None if norm_std is None else _interval(norm_std),
        budgets=tuple(map(_at_budget, overall.budgets)),
    )


def _at_budget(point: BudgetPoint) -> AtBudget:
    values = {name: estimate.value for name, estimate in point.metrics.items()}
    return AtBudget(
        budget=point.budget,
        accuracy=values["accuracy"],
        tokens=values["mean_tokens"],
        norm_std=values.get("norm_std"),
    )


def _interval(estimate: Estimate) -> tuple[float, float] | None:
    if estimate.low is None or estimate.high is None:
        return None
    return estimate.low, estimate.high


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
    phases = {
        phase: median(line[f"{phase}_seconds"] for line in steps)
        for phase in PHASES
        if f"{phase}_seconds" in steps[-1]
    }
    return Training(
        steps=steps[-1]["step"],
        seconds=sum(line["step_seconds"] for line in steps),
        phases=phases,
        tokens=sum(line["trained_tokens"] for line in steps),
        peak_memory_bytes=max(peaks, default=None),
        converged_step=converged,
        converged_seconds=(
            None
            if converged is None
            else sum(line["step_seconds"] for line in steps if line["step"] <= converged)
        ),
        skipped_steps=sum(line["num_accepted"] == 0 for line in steps),
        lengths=list(lengths.items()),
    )


def converged_at(lengths: Sequence[tuple[int, float]]) -> int | None:
    """The step from which on every evaluation's length is near the last one's; None without two
    evaluations. lengths: (step, mean response tokens), ascending.
    """
    if len(lengths) < 2:
        return None
    last = lengths[-1][1]
    first = lengths[-1][0]
    for step, tokens in reversed(lengths):
        if abs(tokens - last) > CONVERGED_WITHIN * last:
            break
        first = step
    return first


def _last_words(files: RunFiles) -> str:
    """The last line of a run's log, which says why it ended; paths in it are the run's own."""
    if not files.log.is_file():
        return "not made yet"
    lines = files.log.read_text(encoding="utf-8", errors="replace").split("\n")
    said = [line for line in lines if line.strip()]
    return said[-1][:300] if said else "it said nothing"


def over_seeds(values: Sequence[float]) -> tuple[float, float]:
    """(mean, standard deviation of the seeds)"""
    return fmean(values), pstdev(values)
