"""Simulated points: of layouts that nobody ran, and of the very steps of runs, to compare."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median

from megatron_opsft.plan.job import Job
from megatron_opsft.plan.lengths import Workload
from megatron_opsft.plan.measured import MeasuredRun
from megatron_opsft.plan.scaling.points import Point
from megatron_opsft.plan.simulate import SimulatedStep, simulate_step
from megatron_opsft.plan.stages import count_stages
from megatron_opsft.plan.verdict import make_plan


def simulate_point(job: Job, workload: Callable[[int], Workload], num_steps: int) -> Point:
    """Medians of steps on the workloads of seeds 0, 1, ..."""
    workloads = [workload(seed) for seed in range(num_steps)]
    plan = make_plan(job, count_stages(job), workloads[0], 1)
    return _point(job, workloads, fits=plan.fits)


def replay_point(run: MeasuredRun) -> Point:
    """The same responses as the run's, step by step."""
    return _point(run.job, [step.workload for step in run.steps], fits=None)


def _point(job: Job, workloads: Sequence[Workload], *, fits: bool | None) -> Point:
    steps = [simulate_step(job, workload) for workload in workloads]

    def middle(of: Callable[[SimulatedStep], float]) -> float:
        return median(of(step) for step in steps)

    config = job.config
    pairs = zip(workloads, steps, strict=True)
    return Point(
        simulated=True,
        source=job.hardware.name,
        model=model_name(config.model.path),
        ranks=job.world_size,
        tp=job.parallel.tp,
        pp=job.parallel.pp,
        vpp=job.parallel.vpp or 1,
        rollout_tp=job.engine_tp,
        prompts_per_step=config.data.prompts_per_step,
        group_size=config.rollout.group_size,
        max_response_tokens=config.rollout.max_response_tokens,
        steps=len(steps),
        step_seconds=middle(lambda step: step.total),
        rollout_seconds=middle(lambda step: step.phases.rollout),
        verify_seconds=middle(lambda step: step.phases.verify),
        train_seconds=middle(lambda step: step.phases.train),
        push_seconds=middle(lambda step: step.phases.push),
        tokens_per_second=median(work.sampled_tokens / step.total for work, step in pairs),
        fits=fits,
        **{
            name: middle(lambda step, name=name: asdict(step.mean)[name])  # type: ignore[misc]
            for name in ("rollout_tail", "pipeline_bubble", "slowest_rank")
        },
    )


def model_name(path: str) -> str:
    """The last part of a path or of a hub name."""
    return path.rstrip("/").rsplit("/", 1)[-1]
