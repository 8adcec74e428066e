"""A device's achieved fractions and overheads, fitted to the steps of real runs.

A phase's seconds are a / fraction + b x overhead + rest: a, b and rest come from the same functions
that predict. Peaks, sizes and prices are not fitted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml

from megatron_opsft.plan.engines import decode_work
from megatron_opsft.plan.hardware import SHIPPED, Hardware, figures_of, read_entries
from megatron_opsft.plan.job import Job
from megatron_opsft.plan.lengths import Workload
from megatron_opsft.plan.measured import PHASES, MeasuredRun, MeasuredStep
from megatron_opsft.plan.memory import rank_memory
from megatron_opsft.plan.predict import StepSeconds, predict_step
from megatron_opsft.plan.stages import count_stages
from megatron_opsft.runtime.durable import write_text

_ENOUGH_SPREAD = 1.3  # of a / b between rows, from which both figures can be told apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Medians over a run's steps, in seconds, with the fitted figures."""

    run: str
    phase: str
    measured: float
    predicted: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """changes: figure -> (before, fitted, how)."""

    hardware: Hardware
    changes: dict[str, tuple[float, float, str]]
    checks: list[Check]

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        return {
            "device": self.hardware.name,
            "figures": {name: after for name, (_, after, _) in self.changes.items()},
            "checks": [
                {
                    "run": check.run,
                    "phase": check.phase,
                    "measured": check.measured,
                    "predicted": check.predicted,
                }
                for check in self.checks
            ],
        }


def calibrate(runs: Sequence[MeasuredRun], base: Hardware) -> Calibration:
    """Training, decoding, push and verification, each from its own phase of all steps."""
    hardware = base
    for fraction, overhead, rows_of in (
        ("training_fraction", "step_overhead_seconds", _training_rows),
        ("decode_fraction", "decode_overhead_seconds", _decoding_rows),
        ("push_fraction", "push_overhead_seconds", _push_rows),
    ):
        rows = [row for run in runs for row in rows_of(run)]
        share, fixed = fit_two(rows, getattr(hardware, fraction), getattr(hardware, overhead))
        figures: Any = {fraction: share, overhead: fixed}
        hardware = replace(hardware, **figures)
        if fraction == "training_fraction":  # products of a forward pass are products
            hardware = replace(hardware, prefill_fraction=share)
        runs = [replace(run, job=replace(run.job, hardware=hardware)) for run in runs]
    verify = [
        step.seconds["verify"] / predicted.verify
        for run in runs
        for step in run.steps
        if (predicted := _predict(run.job, step.workload)).verify
    ]
    if verify:
        seconds = hardware.verify_seconds * median(verify)
        hardware = replace(hardware, verify_seconds=seconds)
        runs = [replace(run, job=replace(run.job, hardware=hardware)) for run in runs]
    before, after = figures_of(base), figures_of(hardware)
    how = f"{sum(len(run.steps) for run in runs)} steps of {len(runs)} runs"
    changes = {
        name: (before[name], after[name], how) for name in after if before[name] != after[name]
    }
    return Calibration(hardware=hardware, changes=changes, checks=_checks(runs))


Row = tuple[float, float, float]
"""(a, b, measured): measured = a / fraction + b x overhead."""


def fit_two(rows: Sequence[Row], fraction: float, overhead: float) -> tuple[float, float]:
    """(fraction in (0, 1], overhead >= 0) by least squares of relative errors.

    Where the rows cannot tell the two apart, the overhead stays as given if it leaves a possible
    fraction; otherwise the fraction stays and the overhead takes the rest.
    """
    if not any(a > 0 for a, _, _ in rows):
        return fraction, max(0.0, median(t / b for _, b, t in rows))
    ratios = [a / b for a, b, _ in rows]
    if max(ratios) > _ENOUGH_SPREAD * min(ratios):
        matrix = np.array([[a / t, b / t] for a, b, t in rows])
        (inverse, fixed), *_ = np.linalg.lstsq(matrix, np.ones(len(rows)), rcond=None)
        if fixed < 0:  # noise: the best that is possible has none
            of_a = matrix[:, 0]
            inverse, fixed = of_a.sum() / (of_a @ of_a), 0.0
        if inverse >= 1:
            return float(1 / inverse), float(fixed)
    inverse = median((t - b * overhead) / a for a, b, t in rows if a > 0)
    if inverse >= 1:
        return float(1 / inverse), overhead
    return fraction, max(0.0, median((t - a / fraction) / b for a, b, t in rows))


def _training_rows(run: MeasuredRun) -> list[Row]:
    """a: products at peak; b: overheads, in micro-batches one after the other."""
    rows = []
    for step in run.steps:
        free = {"training_fraction": 1.0, "step_overhead_seconds": 0.0}
        rest_and_a = _with(run.job, step, free).train
        a = _with(run.job, step, free | {"training_fraction": 0.5}).train - rest_and_a
        b = _with(run.job, step, free | {"step_overhead_seconds": 1.0}).train - rest_and_a
        rows.append((a, b, max(1e-9, step.seconds["train"] - (rest_and_a - a))))
    return rows


def _decoding_rows(run: MeasuredRun) -> list[Row]:
    """a: bytes at the memory's bandwidth; b: decoding steps."""
    rows = []
    for step in run.steps:
        memory = rank_memory(run.job, count_stages(run.job)[0], 1)
        num_bytes, num_steps = decode_work(run.job, memory, step.workload)
        prefill = _predict(run.job, step.workload).prefill
        a = num_bytes / run.job.hardware.memory_bandwidth
        rows.append((a, float(num_steps), max(1e-9, step.seconds["rollout"] - prefill)))
    return rows


def _push_rows(run: MeasuredRun) -> list[Row]:
    """a: bytes at the links' bandwidth; b: one."""
    rows = []
    for step in run.steps:
        free = {"push_fraction": 1.0, "push_overhead_seconds": 0.0}
        rest_and_a = _with(run.job, step, free).push
        a = _with(run.job, step, free | {"push_fraction": 0.5}).push - rest_and_a
        rows.append((a, 1.0, max(1e-9, step.seconds["push"] - (rest_and_a - a))))
    return rows


def _with(job: Job, step: MeasuredStep, figures: dict[str, float]) -> StepSeconds:
    changed: Any = figures
    return _predict(replace(job, hardware=replace(job.hardware, **changed)), step.workload)


def _predict(job: Job, workload: Workload) -> StepSeconds:
    stages = count_stages(job)
    return predict_step(job, stages, [rank_memory(job, stage, 1) for stage in stages], workload)


def _checks(runs: Sequence[MeasuredRun]) -> list[Check]:
    checks = []
    for run in runs:
        predicted = [_predict(run.job, step.workload) for step in run.steps]
        for phase in PHASES:
            checks.append(
                Check(
                    run=run.name,
                    phase=phase,
                    measured=median(step.seconds[phase] for step in run.steps),
                    predicted=median(getattr(step, phase) for step in predicted),
                )
            )
    return checks


def write_hardware(
    out: Path, hardware: Hardware, run_dirs: Sequence[Path], base_file: Path | None
) -> None:
    """The figures of the base file with this device's in place of its own."""
    entries = read_entries(base_file or SHIPPED)
    before = entries[hardware.name]
    figures = dict(figures_of(hardware))
    sources = dict(before.get("sources") or {})
    for name, value in figures.items():
        if float(before[name]) != value:
            sources[name] = "calibrated from " + ", ".join(path.name for path in run_dirs)
    entries[hardware.name] = {**figures, "sources": sources}
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, yaml.safe_dump(entries, sort_keys=False))
