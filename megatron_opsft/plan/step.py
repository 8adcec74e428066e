"""One step of a job in seconds, and what its ranks wait for; pure, no Megatron.

The responses may be a distribution's, drawn, or recorded ones: every engine decodes its own share,
every rank trains on its own micro-batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_opsft.plan.engines import estimate_rollout
from megatron_opsft.plan.job import TrainingJob
from megatron_opsft.plan.lengths import Workload
from megatron_opsft.plan.memory import Stage, engine_elements
from megatron_opsft.plan.reference import exchange_seconds
from megatron_opsft.plan.seconds import push_seconds
from megatron_opsft.plan.stages import count_stages
from megatron_opsft.plan.training import estimate_training, gather_in_push_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """Seconds of a step on its critical path: a phase ends with its slowest rank.

    rollout = prefill + decode; train includes `exchange` (what no backward pass hides) and
    `update`. push is what metrics.jsonl calls sync. bubble: share of a pipeline's time that its
    ranks wait in it; decode_overhead: share of decoding that reads nothing.

    Seconds that a rank waits, means over all ranks: rollout_tail for the slowest engine and
    verification, pipeline_bubble inside of its own pipeline, slowest_rank for another pipeline.
    slots: responses that an engine decodes at once; num_microbatches: of each data-parallel rank,
    of all updates. reference, old_logprob: passes of the reference model and of the policy that
    sampled, where the method asks for them.
    """

    prefill: float
    decode: float
    decode_overhead: float
    verify: float
    train: float
    exchange: float
    update: float
    bubble: float
    push: float
    rollout_tail: float
    pipeline_bubble: float
    slowest_rank: float
    slots: int
    num_microbatches: int
    reference: float = 0.0
    old_logprob: float = 0.0

    @property
    def rollout(self) -> float:
        return self.prefill + self.decode

    @property
    def total(self) -> float:
        scored = self.reference + self.old_logprob
        return self.rollout + self.verify + scored + self.train + self.push

    @property
    def waiting(self) -> float:
        return self.rollout_tail + self.pipeline_bubble + self.slowest_rank


def estimate_step(
    job: TrainingJob, workload: Workload, stages: Sequence[Stage] | None = None
) -> StepEstimate:
    """stages: of `ranks.build_stages`; by default counted, as in a search."""
    stages = stages or count_stages(job)
    rollout = estimate_rollout(job, workload)
    training = estimate_training(job, stages, workload)
    in_pipeline = training.passes + training.bubble
    moved, across = push_bytes(job)
    push = push_seconds(moved, job.hardware, across_nodes=across)
    push += gather_in_push_seconds(job, stages)
    return StepEstimate(
        prefill=rollout.prefill,
        decode=rollout.decode,
        decode_overhead=rollout.decode_overhead,
        verify=rollout.verify,
        train=training.total,
        exchange=training.exchange,
        update=training.update,
        bubble=training.bubble / in_pipeline if in_pipeline else 0.0,
        push=push * max(1.0, job.world_size / job.compute_cores),
        rollout_tail=rollout.tail,
        pipeline_bubble=training.bubble,
        slowest_rank=training.slowest_rank,
        slots=rollout.slots,
        num_microbatches=training.num_microbatches,
        reference=_reference_seconds(job, stages, training.score),
        old_logprob=training.score if job.scores_before else 0.0,
    )


def _reference_seconds(job: TrainingJob, stages: Sequence[Stage], score: float) -> float:
    """Its weights change places with the model's for each update's micro-batches."""
    if not (job.keeps_reference and score):
        return 0.0
    return score + job.config.method.num_updates * exchange_seconds(job, stages)


def push_bytes(job: TrainingJob) -> tuple[float, float]:
    """(bytes that a device receives; share of them between nodes).

    Of what its engine wants a rank holds about 1 / (tp x pp) itself, of experts 1 / (etp x ep x
    pp); other pipeline stages are on other nodes as soon as one stage fills a node.
    """
    if job.world_size == 1:
        return 0.0, 0.0
    wanted = engine_elements(job) * job.dtype_bytes
    parallel, moe = job.parallel, job.shape.moe
    experts = 3.0 * job.shape.num_layers * job.shape.hidden_size * job.dtype_bytes / job.engine_tp
    experts *= moe.num_experts * moe.ffn_size if moe else 0
    held = (wanted - experts) / (parallel.tp * parallel.pp)
    held += experts / (parallel.expert_tp * parallel.ep * parallel.pp)
    received = wanted - held
    stage_ranks = job.world_size // job.parallel.pp
    node = job.hardware.gpus_per_node
    across = 0.0
    if job.world_size > node and stage_ranks >= node:
        across = (job.parallel.pp - 1) / job.parallel.pp
    elif job.world_size > node:
        across = 1 - node / job.world_size
    return received, across
