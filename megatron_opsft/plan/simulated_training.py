"""The second half of a step as a simulation: packing as it is, every pass of every pipeline rank in
the order of Megatron's schedule, the exchange of gradients, and the update.

Tensor-parallel peers do the same at the same time: one process stands for all of them.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from megatron_opsft.architectures.flops import quadratic_at
from megatron_opsft.batching.packing import plan_packing
from megatron_opsft.plan.events import Clock, Process, Signal, Work
from megatron_opsft.plan.job import Job
from megatron_opsft.plan.lengths import Workload
from megatron_opsft.plan.memory import Stage
from megatron_opsft.plan.predict import (
    gather_in_train_seconds,
    reduce_seconds,
    sample_exchange_seconds,
    stage_pass,
)
from megatron_opsft.plan.schedule import Pass, rank_order, what_it_needs
from megatron_opsft.plan.seconds import PassSeconds, optimizer_seconds
from megatron_opsft.plan.simulated_rollout import cores_of, node_cores

Microbatch = tuple[int, ...]
"""Indices of the accepted responses in it; none: a filler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTraining:
    """Seconds of one pipeline rank (and its tensor-parallel peers). bubble: waiting inside of its
    own pipeline; slowest: for the pipelines of other data-parallel ranks.
    """

    stage: int
    passes: float
    bubble: float
    slowest: float
    exchange: float
    update: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTraining:
    """seconds: from when all ranks have verified to the end of the update, on the slowest."""

    seconds: float
    num_microbatches: int
    ranks: list[RankTraining]


def simulate_training(job: Job, stages: Sequence[Stage], workload: Workload) -> SimulatedTraining:
    """Of one step; nothing accepted takes no time."""
    if not workload.accepted:
        idle = [
            RankTraining(stage=s.index, passes=0, bubble=0, slowest=0, exchange=0, update=0)
            for s in stages
        ]
        return SimulatedTraining(seconds=0.0, num_microbatches=0, ranks=idle)
    packed = _pack(job, workload)
    return _Training(job, stages, packed, _seconds_of_passes(job, workload)).run(
        sample_exchange_seconds(job, workload)
    )


def _pack(job: Job, workload: Workload) -> list[list[Microbatch]]:
    """As `train.make_batch` has it: the micro-batches of every data-parallel rank."""
    plan = plan_packing(
        [workload.prompt_tokens + n for n in workload.accepted],
        budget=job.config.train.max_tokens_per_microbatch,
        dp_size=job.dp,
        multiple=job.parallel.pp if job.parallel.vpp else 1,
        quadratic_at=quadratic_at(job.shape),
    )
    return [[tuple(indices) for indices in mine] for mine in plan]


SecondsOf = Callable[[Stage, int, Microbatch], PassSeconds]


def _seconds_of_passes(job: Job, workload: Workload) -> SecondsOf:
    """Of a micro-batch through a chunk of a stage."""
    vpp = job.parallel.vpp or 1

    @cache
    def whole(stage: Stage, microbatch: Microbatch, *, with_loss: bool) -> PassSeconds:
        lengths = [workload.prompt_tokens + workload.accepted[i] for i in microbatch] or [1]
        tokens = sum(workload.accepted[i] for i in microbatch)
        return stage_pass(job, stage, lengths, tokens * with_loss)

    def of_chunk(stage: Stage, chunk: int, microbatch: Microbatch) -> PassSeconds:
        layers = whole(stage, microbatch, with_loss=False)
        if chunk < vpp - 1 or not stage.has_output:
            return PassSeconds(forward=layers.forward / vpp, backward=layers.backward / vpp)
        both = whole(stage, microbatch, with_loss=True)
        return PassSeconds(
            forward=layers.forward / vpp + both.forward - layers.forward,
            backward=layers.backward / vpp + both.backward - layers.backward,
        )

    return of_chunk


class _Training:
    """One phase under way."""

    def __init__(
        self,
        job: Job,
        stages: Sequence[Stage],
        packed: list[list[Microbatch]],
        seconds_of: SecondsOf,
    ) -> None:
        self.job, self.stages, self.packed = job, stages, packed
        self.seconds_of = seconds_of
        self.clock = Clock()
        self.cores = node_cores(self.clock, job)
        self.done: dict[tuple[int, Pass, int], Signal] = defaultdict(Signal)
        self.backward_ended = [Signal(job.dp) for _ in stages]
        self.reduced = Signal(job.dp * len(stages))
        # By replica and stage: when its passes, when its update was through.
        self.own_end: dict[tuple[int, int], float] = {}
        self.ended: dict[tuple[int, int], float] = {}
        self.ranks: dict[tuple[int, int], RankTraining] = {}

    def run(self, exchange_of_samples: float) -> SimulatedTraining:
        """All ranks from the exchange of the accepted samples to the end of the update."""
        for replica in range(self.job.dp):
            for stage in self.stages:
                self.clock.start(self._rank(replica, stage, exchange_of_samples))
        self.clock.run()
        end = self.clock.now
        return SimulatedTraining(
            seconds=end,
            num_microbatches=len(self.packed[0]),
            ranks=[
                replace(rank, slowest=rank.slowest + end - self.ended[key])
                for key, rank in sorted(self.ranks.items())
            ],
        )

    def _rank(self, replica: int, stage: Stage, exchange_of_samples: float) -> Process:
        clock, job, tp = self.clock, self.job, self.job.parallel.tp
        first_rank = (stage.index * job.dp + replica) * tp
        cores = cores_of(self.cores, job, first_rank)
        passes, last_backward = 0.0, 0.0
        yield exchange_of_samples
        begun = clock.now
        pp, vpp = len(self.stages), job.parallel.vpp or 1
        for one in rank_order(stage.index, pp, len(self.packed[replica]), vpp):
            needed = what_it_needs(one, stage.index, pp, vpp)
            if needed is not None:
                yield self.done[replica, *needed]
            seconds = self.seconds_of(stage, one.chunk, self.packed[replica][one.microbatch])
            last_backward = seconds.backward
            start = clock.now
            yield Work(seconds.forward if one.forward else last_backward, cores, tp)
            passes += clock.now - start
            if pp > 1:
                clock.arrive(self.done[replica, one, stage.index])
        self.own_end[replica, stage.index] = clock.now
        yield clock.arrive(self.backward_ended[stage.index])
        reduce = reduce_seconds(job, stage, last_backward * vpp)
        yield reduce
        yield clock.arrive(self.reduced)  # for the norm of the gradients
        everyone = clock.now
        start = clock.now
        update = optimizer_seconds(stage.num_parameters, job.dp, job.hardware)
        yield Work(update, cores, tp)
        update = clock.now - start
        gather = gather_in_train_seconds(job, stage)
        yield gather
        self.ended[replica, stage.index] = clock.now
        pipeline_end = max(self.own_end[replica, s.index] for s in self.stages)
        self.ranks[replica, stage.index] = RankTraining(
            stage=stage.index,
            passes=passes,
            bubble=pipeline_end - begun - passes,
            slowest=max(0.0, everyone - pipeline_end - reduce),
            exchange=exchange_of_samples + min(reduce, everyone - pipeline_end) + gather,
            update=update,
        )
