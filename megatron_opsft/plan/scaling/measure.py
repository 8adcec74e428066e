"""Where points come from: the metrics of runs, and the model of a step."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from megatron_opsft.config import Config
from megatron_opsft.plan.estimate import estimate_run
from megatron_opsft.plan.job import TrainingJob
from megatron_opsft.plan.lengths import Workload
from megatron_opsft.plan.measured import PHASES, MeasuredRun, read_metrics
from megatron_opsft.plan.scaling.points import ScalingPoint
from megatron_opsft.plan.stages import count_stages
from megatron_opsft.plan.step import estimate_step

_WAITING = ("rollout_tail", "pipeline_bubble", "slowest_rank")


def measured_point(run_dir: Path) -> ScalingPoint:
    """Medians over the steps of a run, without the first ones. Errors: `UserError`."""
    config, ranks, lines = read_metrics(run_dir)
    sampled = (n["mean_response_tokens"] * n["num_rollouts"] / n["step_seconds"] for n in lines)
    seconds: dict[str, Any] = {
        f"{phase}_seconds": _median(line[f"{key}_seconds"] for line in lines)
        for phase, key in {"step": "step", **PHASES}.items()
    }
    return ScalingPoint(
        simulated=False,
        source=str(run_dir),
        **_case(config, ranks),
        steps=len(lines),
        **seconds,
        tokens_per_second=_median(sampled),
    )


def simulated_point(job: TrainingJob, workloads: Sequence[Workload]) -> ScalingPoint:
    """Medians of steps on these workloads."""
    fits = estimate_run(job, count_stages(job), workloads[0], 1).fits
    return replace(_simulated(job, workloads), fits=fits)


def replayed_point(run: MeasuredRun) -> ScalingPoint:
    """The same responses as the run's, step by step."""
    return _simulated(run.job, [step.workload for step in run.steps])


def _simulated(job: TrainingJob, workloads: Sequence[Workload]) -> ScalingPoint:
    steps = [estimate_step(job, workload) for workload in workloads]
    sampled = (w.sampled_tokens / s.total for w, s in zip(workloads, steps, strict=True))
    seconds: dict[str, Any] = {
        f"{phase}_seconds": _median(getattr(step, phase) for step in steps) for phase in PHASES
    }
    waiting: dict[str, Any] = {
        name: _median(getattr(step, name) / step.total for step in steps) for name in _WAITING
    }
    return ScalingPoint(
        simulated=True,
        source=job.hardware.name,
        **_case(job.config, job.world_size),
        steps=len(steps),
        step_seconds=_median(step.total for step in steps),
        **seconds,
        tokens_per_second=_median(sampled),
        **waiting,
    )


def _case(config: Config, ranks: int) -> dict[str, Any]:
    return {
        "model": config.model.path.rstrip("/").rsplit("/", 1)[-1],
        "ranks": ranks,
        "tp": config.parallel.tp,
        "pp": config.parallel.pp,
        "vpp": config.parallel.vpp or 1,
        "rollout_tp": config.rollout.tp,
        "prompts_per_step": config.data.prompts_per_step,
        "group_size": config.rollout.group_size,
        "max_response_tokens": config.rollout.max_response_tokens,
    }


def _median(values: Iterable[float]) -> float:
    return float(median(values))
