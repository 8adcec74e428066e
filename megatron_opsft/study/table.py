"""What the runs of a study came to, from their directories alone: table.json, one object a run."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

from megatron_opsft.evaluate.results import read_results
from megatron_opsft.report.estimate import Estimate
from megatron_opsft.report.lines import read_json_lines
from megatron_opsft.runtime.durable import write_text
from megatron_opsft.study.jobs import RunFiles, files_of
from megatron_opsft.study.study_file import StudyPlan, StudyRun

PHASES = ("rollout", "verify", "reference", "old_logprob", "train", "sync")
CONVERGED_WITHIN = 0.1  # of the last evaluation's length, and ever after


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Of a run that trains. seconds: of all steps; phases: median seconds a step by phase, in the
    order of a step; tokens: response tokens learned from; converged: (step, seconds) of the first
    evaluation from which on the mean length stays within 10 % of the last one's.
    """

    steps: int
    seconds: float
    phases: dict[str, float]
    tokens: int
    converged_step: int | None
    converged_seconds: float | None
    skipped_steps: int
    lengths: list[tuple[int, float]]


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
        "settings": {"train": run.settings, "eval": run.eval_settings},
        "seed": run.seed,
        "directory": str(files.directory.relative_to(out)),
        "training": _read_training(files) if run.trains else None,
    }
    if facts["training"] is not None:
        facts["seconds"] = facts["training"].seconds
    if not files.is_finished:
        return Row(**facts, error=_last_words(files))
    found = read_results(files.evaluation).overall.metrics
    accuracy, tokens = found["accuracy"], found["mean_tokens"]
    return Row(
        **facts,
        accuracy=accuracy.value,
        accuracy_interval=_interval(accuracy),
        pass_at_n=found["pass_at_n"].value,
        tokens=tokens.value,
        tokens_interval=_interval(tokens),
        compression_ratio=tokens.value / base if base else None,
        efficiency=found["efficiency"].value,
        norm_std=found["norm_std"].value,
    )


def _interval(estimate: Estimate) -> tuple[float, float] | None:
    if estimate.low is None or estimate.high is None:
        return None
    return estimate.low, estimate.high


def _read_training(files: RunFiles) -> Training | None:
    steps = read_json_lines(files.train / "metrics.jsonl", required=("step_seconds",))
    if not steps:
        return None
    evaluations = read_json_lines(
        files.train / "evals.jsonl", required=("eval_mean_response_tokens",)
    )
    lengths = [(line["step"], line["eval_mean_response_tokens"]) for line in evaluations]
    converged = converged_at(lengths)
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
        converged_step=converged,
        converged_seconds=(
            None
            if converged is None
            else sum(line["step_seconds"] for line in steps if line["step"] <= converged)
        ),
        skipped_steps=sum(line["num_accepted"] == 0 for line in steps),
        lengths=lengths,
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
