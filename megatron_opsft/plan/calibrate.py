"""The factor of each phase of a device, from the steps of real runs: how many times longer they
took than a plan without it says. Everything else of the device stays.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megatron_opsft.config import Config
from megatron_opsft.config.load import load_config
from megatron_opsft.errors import UserError
from megatron_opsft.plan.checks import check_job
from megatron_opsft.plan.estimate import StepEstimate, estimate_step
from megatron_opsft.plan.hardware import PHASES, Hardware
from megatron_opsft.plan.job import TrainingJob, make_job
from megatron_opsft.plan.stages import count_stages
from megatron_opsft.plan.workload import (
    Workload,
    learned_by,
    mean_before_the_cut,
    quantiles,
)
from megatron_opsft.report.lines import read_json_lines
from megatron_opsft.runtime.durable import write_text

_WARM_UP_STEPS = 2  # the first ones compile, allocate, and stream the first weights

Seconds = dict[str, tuple[float, float]]
"""Phase of a step -> (measured on rank 0, planned)."""


def read_steps(
    path: Path, hardware: Hardware, *, prompt_tokens: int, sigma: float
) -> list[Seconds]:
    """The steps of `plan_steps`, each phase measured and planned. Errors: as there, and as of
    `read_run`.
    """
    config, manifest = read_run(path)
    job = make_job(config, hardware, manifest["world_size"])
    return [
        {
            phase: (float(line[f"{phase}_seconds"]), float(getattr(planned, phase)))
            for phase in PHASES
        }
        for line, planned in plan_steps(path, job, prompt_tokens=prompt_tokens, sigma=sigma)
    ]


def plan_steps(
    path: Path, job: TrainingJob, *, prompt_tokens: int, sigma: float
) -> list[tuple[dict[str, Any], StepEstimate]]:
    """The steps of a run directory with an update, without the first ones: each line of
    metrics.jsonl beside its plan as a step of `job`.

    Errors: `UserError` for a damaged line, for a job that cannot be, and where no step is left.
    """
    check_job(job)
    stages = count_stages(job)
    required = ["num_accepted", "step_seconds", *(f"{phase}_seconds" for phase in PHASES)]
    lines = read_json_lines(path / "metrics.jsonl", required=required)[_WARM_UP_STEPS:]
    steps = []
    for line in lines:
        if line["num_accepted"]:
            workload = _workload(line, job, prompt_tokens, sigma)
            steps.append((line, estimate_step(job, workload, stages)))
    if not steps:
        raise UserError(
            f"{path}: metrics.jsonl has no step with an update after the first {_WARM_UP_STEPS}"
        )
    return steps


def read_run(path: Path) -> tuple[Config, dict[str, Any]]:
    """config.yaml and manifest.json of a run directory, whose `world_size` is a number.

    Errors: `UserError` for what is missing or damaged.
    """
    for name in ("config.yaml", "manifest.json", "metrics.jsonl"):
        if not (path / name).is_file():
            raise UserError(f"{path} holds no {name}: it is not the directory of a run")
    config = load_config(path / "config.yaml")
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        return config, manifest | {"world_size": int(manifest["world_size"])}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}/manifest.json is damaged: {error!r}") from None


def _workload(line: dict[str, Any], job: TrainingJob, prompt_tokens: int, sigma: float) -> Workload:
    """The responses that a line of metrics.jsonl describes by their means."""
    limit = job.config.rollout.max_response_tokens
    mean = mean_before_the_cut(line["mean_response_tokens"], sigma=sigma, limit=limit)
    lengths = quantiles(int(line["num_rollouts"]), mean_tokens=mean, sigma=sigma, limit=limit)
    accepted = [max(1, round(line["mean_accepted_tokens"]))] * int(line["num_accepted"])
    return learned_by(job.config, lengths, accepted, prompt_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedPhase:
    """Medians over all steps, in seconds: measured, and planned with the factor before. factor: the
    fitted one.
    """

    measured: float
    planned: float
    factor: float


def calibrate(steps: Sequence[Seconds], base: Hardware) -> dict[str, FittedPhase]:
    """Each phase's factor, so that the median step takes what was measured; a phase that no run
    has is left out.
    """
    fitted = {}
    for phase in PHASES:
        both = [step[phase] for step in steps]
        if ratios := [measured / planned for measured, planned in both if measured and planned]:
            fitted[phase] = FittedPhase(
                measured=median(measured for measured, _ in both),
                planned=median(planned for _, planned in both),
                factor=getattr(base, f"{phase}_factor") * median(ratios),
            )
    return fitted


def write_hardware(
    out: Path, base: Hardware, fitted: dict[str, FittedPhase], run_dirs: Sequence[Path]
) -> None:
    """The device's figures with the fitted factors, as a file for --hardware."""
    figures = base.figures | {f"{p}_factor": one.factor for p, one in fitted.items()}
    runs = ", ".join(path.name for path in run_dirs)
    lines = [f"# Factors from {runs}, by `megatron-opsft plan calibrate`.", f"{base.name}:"]
    lines += [f"  {name}: {value!r}" for name, value in figures.items()]
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, "\n".join(lines) + "\n")
