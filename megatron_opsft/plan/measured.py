"""The steps of real runs: what was sampled and accepted, and how long each phase took."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_opsft.architectures.shape import ModelShape
from megatron_opsft.config import Config
from megatron_opsft.config_file import load_config
from megatron_opsft.errors import UserError
from megatron_opsft.plan.checks import check_job
from megatron_opsft.plan.hardware import Hardware
from megatron_opsft.plan.job import TrainingJob
from megatron_opsft.plan.learning import learned_by
from megatron_opsft.plan.lengths import Workload, mean_before_the_cut, quantiles, shuffled
from megatron_opsft.plan.traces import read_step, replay
from megatron_opsft.report.lines import read_json_lines
from megatron_opsft.runtime.step_names import rollout_files

# Of a plan -> of metrics.jsonl.
PHASES = {"rollout": "rollout", "verify": "verify", "train": "train", "push": "sync"}
WARM_UP_STEPS = 2  # the first ones compile, allocate, and stream the first push


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """workload: what was sampled and accepted; seconds: by phase, on rank 0; total: of the step."""

    step: int
    workload: Workload
    seconds: dict[str, float]
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A run's steps without the first ones."""

    name: str
    job: TrainingJob
    steps: tuple[MeasuredStep, ...]


def read_run(
    path: Path,
    read_shape: Callable[[str], ModelShape],
    hardware: Hardware,
    *,
    prompt_tokens: int,
    sigma: float,
) -> MeasuredRun:
    """config.yaml, manifest.json and metrics.jsonl of a run directory, and the lengths in rollouts/
    where they were saved. Errors: as `read_metrics`, and `check_job`'s.
    """
    config, world_size, lines = read_metrics(path)
    shape = read_shape(config.model.path)
    job = TrainingJob(config=config, shape=shape, hardware=hardware, world_size=world_size)
    check_job(job)
    steps = tuple(_measured_step(path, line, job, prompt_tokens, sigma) for line in lines)
    return MeasuredRun(name=path.name, job=job, steps=steps)


def read_metrics(path: Path) -> tuple[Config, int, list[dict[str, Any]]]:
    """Configuration, number of ranks and metrics of a run's steps with an update, without the first
    ones of all. Errors: `UserError` for what is missing or damaged, and where no step is left.
    """
    for name in ("config.yaml", "manifest.json", "metrics.jsonl"):
        if not (path / name).is_file():
            raise UserError(f"{path} holds no {name}: it is not the directory of a run")
    config = load_config(path / "config.yaml")
    try:
        world_size = int(json.loads((path / "manifest.json").read_text())["world_size"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}/manifest.json is damaged: {error!r}") from None
    seconds = [f"{phase}_seconds" for phase in (*PHASES.values(), "step")]
    lines = read_json_lines(path / "metrics.jsonl", required=["num_accepted", *seconds])
    trained = [line for line in lines[WARM_UP_STEPS:] if line["num_accepted"]]
    if not trained:
        raise UserError(
            f"{path}: metrics.jsonl has no step with an update after the first {WARM_UP_STEPS}"
        )
    return config, world_size, trained


def _measured_step(
    path: Path, line: dict[str, Any], job: TrainingJob, prompt_tokens: int, sigma: float
) -> MeasuredStep:
    folder = path / "rollouts"
    saved = rollout_files(folder) if folder.is_dir() else []
    groups = [g for step, file in saved if step == line["step"] for g in read_step(file)]
    if groups:
        limit = job.config.rollout.max_response_tokens
        workload = replay(groups, prompt_tokens=prompt_tokens, limit=limit)
    else:
        workload = _from_means(line, job, prompt_tokens, sigma)
    return MeasuredStep(
        step=int(line["step"]),
        workload=learned_by(job.config, workload),
        seconds={phase: line[f"{key}_seconds"] for phase, key in PHASES.items()},
        total=line["step_seconds"],
    )


def _from_means(
    line: dict[str, Any], job: TrainingJob, prompt_tokens: int, sigma: float
) -> Workload:
    """What metrics.jsonl says of a step whose rollouts were not saved."""
    limit = job.config.rollout.max_response_tokens
    mean = mean_before_the_cut(line["mean_response_tokens"], sigma=sigma, limit=limit)
    lengths = quantiles(int(line["num_rollouts"]), mean_tokens=mean, sigma=sigma, limit=limit)
    return Workload(
        lengths=shuffled(lengths),
        accepted=(max(1, round(line["mean_accepted_tokens"])),) * int(line["num_accepted"]),
        prompt_tokens=prompt_tokens,
        limit=limit,
    )
