"""One step of a job as a discrete-event simulation: how long it takes, and who waits for whom.

Where `predict` takes averages, this follows every engine, every verification and every pass of
every pipeline rank, on responses of given lengths. All seconds come from the same functions, so
that without variance both say the same. Pure, no Megatron.

Ranks meet between the phases: when the accepted samples are exchanged, in the norm of the
gradients, and in the push.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_opsft.plan.engines import num_slots
from megatron_opsft.plan.events import Clock, Process, Work
from megatron_opsft.plan.job import Job
from megatron_opsft.plan.lengths import Workload
from megatron_opsft.plan.memory import Stage, rank_memory
from megatron_opsft.plan.predict import push_phase_seconds
from megatron_opsft.plan.simulated_rollout import (
    SimulatedRollout,
    cores_of,
    node_cores,
    simulate_rollout,
)
from megatron_opsft.plan.simulated_training import SimulatedTraining, simulate_training
from megatron_opsft.plan.stages import count_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Seconds. `push` is what metrics.jsonl calls sync."""

    rollout: float
    verify: float
    train: float
    push: float

    @property
    def total(self) -> float:
        return self.rollout + self.verify + self.train + self.push


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What the ranks of one pipeline stage do with a step, shares of it that add up to 1, means.

    Waiting: `rollout_tail` for the slowest engine or verification, `pipeline_bubble` inside of a
    rank's own pipeline, `slowest_rank` for another data-parallel rank's pipeline. At work: the
    others; `exchange` is of samples, gradients and weights, as far as nothing hides it.
    """

    sampling: float
    verifying: float
    passes: float
    exchange: float
    update: float
    push: float
    rollout_tail: float
    pipeline_bubble: float
    slowest_rank: float

    @property
    def idle(self) -> float:
        return self.rollout_tail + self.pipeline_bubble + self.slowest_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """phases: the critical path, where a phase ends with its slowest rank. on_rank_0: as its
    stopwatch has it in metrics.jsonl, where waiting for the others belongs to `train`. stages: of
    every pipeline stage; mean: of all ranks.
    """

    phases: Phases
    on_rank_0: Phases
    stages: tuple[Shares, ...]
    mean: Shares
    num_microbatches: int

    @property
    def total(self) -> float:
        return self.phases.total


def simulate_step(
    job: Job, workload: Workload, stages: Sequence[Stage] | None = None
) -> SimulatedStep:
    """One step. stages: of `ranks.build_stages`; by default counted, as in a search."""
    stages = stages or count_stages(job)
    slots = num_slots(job, rank_memory(job, stages[0], 1), workload)
    rollout = simulate_rollout(job, workload, slots)
    training = simulate_training(job, stages, workload)
    push = _simulate_push(job, push_phase_seconds(job, list(stages)))
    total = rollout.end + training.seconds + push
    by_stage = tuple(_shares(job, rollout, training, push, total, s.index) for s in stages)
    return SimulatedStep(
        phases=Phases(
            rollout=rollout.seconds,
            verify=rollout.end - rollout.seconds,
            train=training.seconds,
            push=push,
        ),
        on_rank_0=Phases(
            rollout=rollout.verify_begun[0],
            verify=rollout.verified[0] - rollout.verify_begun[0],
            train=rollout.end - rollout.verified[0] + training.seconds,
            push=push,
        ),
        stages=by_stage,
        mean=_mean(by_stage),
        num_microbatches=training.num_microbatches,
    )


def _simulate_push(job: Job, seconds: float) -> float:
    """All ranks at once; on CPUs they share the cores of a node."""
    clock = Clock()
    cores = node_cores(clock, job)

    def rank(number: int) -> Process:
        yield Work(seconds, cores_of(cores, job, number))

    for number in range(job.world_size if cores else 1):
        clock.start(rank(number))
    clock.run()
    return clock.now


def _shares(
    job: Job,
    rollout: SimulatedRollout,
    training: SimulatedTraining,
    push: float,
    total: float,
    stage: int,
) -> Shares:
    """Of the ranks of one stage."""
    per_stage = job.world_size // job.parallel.pp
    ranks = range(stage * per_stage, (stage + 1) * per_stage)
    verifying = sum(rollout.verified[r] - rollout.verify_begun[r] for r in ranks) / per_stage
    sampling = sum(rollout.sampled[r] for r in ranks) / per_stage
    trained = [rank for rank in training.ranks if rank.stage == stage]

    def mean(name: str) -> float:
        return sum(getattr(rank, name) for rank in trained) / len(trained)

    return Shares(
        sampling=sampling / total,
        verifying=verifying / total,
        rollout_tail=(rollout.end - sampling - verifying) / total,
        passes=mean("passes") / total,
        pipeline_bubble=mean("bubble") / total,
        slowest_rank=mean("slowest") / total,
        exchange=mean("exchange") / total,
        update=mean("update") / total,
        push=push / total,
    )


def _mean(stages: Sequence[Shares]) -> Shares:
    return Shares(
        **{
            name: sum(getattr(stage, name) for stage in stages) / len(stages)
            for name in Shares.__dataclass_fields__
        }
    )
