"""A device's achieved fractions and overheads, fitted to the steps of real runs.

A phase's seconds are a / fraction + b x overhead + rest: a, b and rest come from the same functions
that predict. Peaks, sizes and prices are not fitted.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml

from megatron_opsft.plan.hardware import SHIPPED, Hardware, figures_of, read_entries
from megatron_opsft.plan.measured import PHASES, MeasuredRun, MeasuredStep
from megatron_opsft.plan.step import StepEstimate, estimate_step
from megatron_opsft.runtime.durable import write_text

_ENOUGH_SPREAD = 1.3  # of a / b between rows, from which both figures can be separated


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationCheck:
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
    checks: list[CalibrationCheck]

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        return {
            "device": self.hardware.name,
            "figures": {name: after for name, (_, after, _) in self.changes.items()},
            "checks": [asdict(check) for check in self.checks],
        }


def calibrate(runs: Sequence[MeasuredRun], base: Hardware) -> Calibration:
    """Training, decoding, push and verification, each from its own phase of all steps."""
    hardware = base
    for phase, fraction, overhead in (
        ("train", "training_fraction", "step_overhead_seconds"),
        ("rollout", "decode_fraction", "decode_overhead_seconds"),
        ("push", "push_fraction", "push_overhead_seconds"),
    ):
        rows = [
            _row(run, step, hardware, phase, fraction, overhead)
            for run in runs
            for step in run.steps
        ]
        share, fixed = fit_two(rows, getattr(hardware, fraction), getattr(hardware, overhead))
        hardware = _with(hardware, {fraction: share, overhead: fixed})
        if phase == "train":  # products of a forward pass are products
            hardware = replace(hardware, prefill_fraction=share)
    verify = [
        step.seconds["verify"] / seconds
        for run in runs
        for step in run.steps
        if (seconds := _estimate(run, step, hardware).verify)
    ]
    if verify:
        hardware = replace(hardware, verify_seconds=hardware.verify_seconds * median(verify))
    before, after = figures_of(base), figures_of(hardware)
    how = f"{sum(len(run.steps) for run in runs)} steps of {len(runs)} runs"
    changes = {
        name: (before[name], after[name], how) for name in after if before[name] != after[name]
    }
    return Calibration(hardware=hardware, changes=changes, checks=_checks(runs, hardware))


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


def _row(
    run: MeasuredRun,
    step: MeasuredStep,
    hardware: Hardware,
    phase: str,
    fraction: str,
    overhead: str,
) -> Row:
    """One phase of a step, whose estimate is linear in 1 / fraction and in the overhead.

    a: training: products at peak; rollout: bytes that decoding reads, at the memory's bandwidth;
    push: bytes at the links'. b: overheads one after the other.
    """
    free = {fraction: 1.0, overhead: 0.0}
    prompts = 0.0
    if phase == "rollout":
        # Reading prompts is products, and so small a batch as a calibration's reads weights longer
        # than it multiplies.
        prompts = _estimate(run, step, hardware).prefill
        free["peak_flops"] = float("inf")

    def seconds(figures: dict[str, float]) -> float:
        estimate = _estimate(run, step, _with(hardware, free | figures))
        return float(getattr(estimate, phase))

    rest_and_a = seconds({})
    a = seconds({fraction: 0.5}) - rest_and_a
    b = seconds({overhead: 1.0}) - rest_and_a
    return a, b, max(1e-9, step.seconds[phase] - prompts - (rest_and_a - a))


def _with(hardware: Hardware, figures: dict[str, float]) -> Hardware:
    changed: Any = figures
    return replace(hardware, **changed)


def _estimate(run: MeasuredRun, step: MeasuredStep, hardware: Hardware) -> StepEstimate:
    return estimate_step(replace(run.job, hardware=hardware), step.workload)


def _checks(runs: Sequence[MeasuredRun], hardware: Hardware) -> list[CalibrationCheck]:
    checks = []
    for run in runs:
        predicted = [_estimate(run, step, hardware) for step in run.steps]
        for phase in PHASES:
            checks.append(
                CalibrationCheck(
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
