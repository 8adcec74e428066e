"""The training phase of a step: the trainer's own packing, every pass of every pipeline, the
exchange of gradients and weights, and the update; pure, no Megatron.

Ranks meet twice: in the norm of the gradients, and at the end. Tensor-parallel peers do the same at
the same time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from itertools import chain
from typing import Any

import numpy as np

from megatron_opsft.architectures.flops import forward_flops, quadratic_at
from megatron_opsft.batching.packing import plan_packing
from megatron_opsft.batching.zigzag import padded
from megatron_opsft.plan.cores import shared_ends
from megatron_opsft.plan.job import TrainingJob
from megatron_opsft.plan.learning import updates_of
from megatron_opsft.plan.lengths import Workload
from megatron_opsft.plan.memory import Stage
from megatron_opsft.plan.pipeline import pipeline_ends
from megatron_opsft.plan.seconds import optimizer_seconds, ring_seconds, sequence_seconds

# Of every rank, for all responses of the step; measured on one core.
_FACTS_BYTES = 32
_FACTS_SECONDS = 5e-6  # one response's facts: received, sorted, weighed by the method
_PLAN_SECONDS = 2.5e-6  # one accepted response's place in the plan, once that is made
# Of one rank, for the parts of the plan that it makes.
_PACKING_SECONDS = 13e-6  # one accepted response's place
_PART = 1024  # accepted responses that are planned together
# Of the tokens that a replica trains on.
_TOKEN_BYTES = 4
_TOKEN_SECONDS = 60e-9  # from int32 to the lists that are packed


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEstimate:
    """Seconds; total: from the exchange of the accepted samples to the end of the update.

    exchange: of samples, gradients and weights, as far as no pass hides it. Means over the ranks:
    passes; bubble: waiting inside of a rank's own pipeline; slowest_rank: for another one. All are
    sums over the updates of the batch. score: the forward passes of all, which are not in `total`.
    """

    total: float = 0.0
    exchange: float = 0.0
    update: float = 0.0
    passes: float = 0.0
    bubble: float = 0.0
    slowest_rank: float = 0.0
    num_microbatches: int = 0
    score: float = 0.0


def estimate_training(
    job: TrainingJob, stages: Sequence[Stage], workload: Workload
) -> TrainingEstimate:
    """One step on all ranks; nothing accepted takes no time."""
    updates = [
        _estimate_update(job, stages, part)
        for part in updates_of(job.config, workload)
        if part.accepted
    ]
    if not updates:
        return TrainingEstimate()
    summed = {
        each.name: sum(getattr(update, each.name) for update in updates)
        for each in fields(TrainingEstimate)
    }
    samples = sample_exchange_seconds(job, workload)
    summed["total"] += samples
    summed["exchange"] += samples
    return TrainingEstimate(**summed)


def _estimate_update(
    job: TrainingJob, stages: Sequence[Stage], workload: Workload
) -> TrainingEstimate:
    """One optimizer step, its samples being there."""
    forward, backward = _passes(job, stages, workload)
    passes = (forward + backward).sum(axis=(1, 3))
    ends = pipeline_ends(forward, backward)
    crowding = _crowding(job, passes, ends)
    passes, ends = passes * crowding, ends * crowding
    pipelines = ends.max(axis=0)
    # The last backward pass of all chunks hides the reduction of what came before.
    hidden = job.num_chunks * backward[:, 0, :, -1].min(axis=1)
    reduce = np.array([reduce_seconds(job, s, h) for s, h in zip(stages, hidden, strict=True)])
    reduced = (ends.max(axis=1) + reduce).max()
    crowd = max(1.0, job.world_size / job.compute_cores)
    update = np.array(
        [
            optimizer_seconds(s.num_parameters - s.expert_parameters, job.num_copies, job.hardware)
            + optimizer_seconds(s.expert_parameters, job.num_expert_copies, job.hardware)
            for s in stages
        ]
    )
    update *= crowd
    gathered = update + [gather_in_train_seconds(job, stage) for stage in stages]
    after = gathered.max()
    waits_for_others = (reduced - pipelines - reduce[:, None]).clip(0) + (after - gathered)[:, None]
    return TrainingEstimate(
        total=float(reduced + after),
        exchange=float(reduced - ends.max() + after - update.max()),
        update=float(update.max()),
        passes=float(passes.mean()),
        bubble=float((pipelines - passes).clip(0).mean()),
        slowest_rank=float(waits_for_others.mean()),
        num_microbatches=forward.shape[3],
        score=_score_seconds(job, forward),
    )


def _score_seconds(job: TrainingJob, forward: Any) -> float:
    """The forward passes alone, until the slowest pipeline is through."""
    ends = pipeline_ends(forward, np.zeros_like(forward))
    return float((ends * _crowding(job, forward.sum(axis=(1, 3)), ends)).max())


def _passes(job: TrainingJob, stages: Sequence[Stage], workload: Workload) -> tuple[Any, Any]:
    """Seconds of every (forward, backward) pass, float64 [pp, chunks, dp, micro-batches]."""
    microbatch_of, count = _pack(
        workload,
        job.config.train.max_tokens_per_microbatch,
        job.dp,
        job.parallel.cp,
        job.align if job.parallel.cp > 1 else 1,
        job.parallel.pp if job.parallel.vpp else 1,
        quadratic_at(job.shape),
    )
    responses = np.array(workload.accepted)

    @cache
    def whole(num_layers: int, *, has_output: bool) -> Any:
        """Through all layers of a stage, [2, dp, micro-batches]."""
        parts = sequence_seconds(
            job, num_layers, responses + workload.prompt_tokens, responses * has_output
        )
        summed = [np.bincount(microbatch_of, part, job.dp * count) for part in parts]
        return np.reshape(summed, (2, job.dp, count)) + job.hardware.step_overhead_seconds / 2

    seconds = []
    for stage in stages:
        layers = whole(stage.num_layers, has_output=False)
        chunks = np.repeat(layers[:, None] / job.num_chunks, job.num_chunks, axis=1)
        chunks[:, -1] += whole(stage.num_layers, has_output=stage.has_output) - layers
        seconds.append(chunks)
    forward, backward = np.stack(seconds, axis=1)
    return forward, backward


# A search packs the same responses for many layouts.
@lru_cache(maxsize=32)
def _pack(
    workload: Workload,
    budget: int,
    dp: int,
    cp: int,
    align: int,
    multiple: int,
    quadratic_length: float,
) -> tuple[Any, int]:
    """As `step.batch.pack_update` does it: (of each accepted response rank x count + micro-batch of
    the rank, int64; count: micro-batches of each rank). Some may be empty.
    """
    bins = plan_packing(
        [padded(workload.prompt_tokens + n, cp, align) for n in workload.accepted],
        budget=budget * cp,
        dp_size=dp,
        multiple=multiple,
        quadratic_at=quadratic_length,
    )
    microbatch_of = np.empty(len(workload.accepted), dtype=np.int64)
    for number, indices in enumerate(chain.from_iterable(bins)):
        microbatch_of[indices] = number
    return microbatch_of, len(bins[0])


def _crowding(job: TrainingJob, passes: Any, ends: Any) -> Any:
    """How many times longer each pipeline takes where its ranks share cores, float64 [dp]: a
    pipeline is as wide as ranks of it are busy on average.
    """
    alone = ends.max(axis=0)
    widths = job.parallel.tp * job.parallel.cp * passes.sum(axis=0) / alone
    return np.array(shared_ends(alone, widths, job.compute_cores)) / alone


def reduce_seconds(job: TrainingJob, stage: Stage, last_backward: float) -> float:
    """The gradients' reduction over the data-parallel ranks: what does not hide behind the last
    backward pass.
    """
    seconds = _shared_seconds(job, stage, stage.gradient_bytes)
    return max(0.0, seconds - last_backward) if job.parallel.overlap_grad_reduce else seconds


def gather_in_train_seconds(job: TrainingJob, stage: Stage) -> float:
    """The gather of the updated weights, where the trainer waits for it."""
    return 0.0 if _gather_overlaps(job) else _gather_seconds(job, stage)


def gather_in_push_seconds(job: TrainingJob, stages: Sequence[Stage]) -> float:
    """The gather of the updated weights, where the push waits for it."""
    return max(_gather_seconds(job, s) for s in stages) if _gather_overlaps(job) else 0.0


def _gather_overlaps(job: TrainingJob) -> bool:
    return job.parallel.overlap_param_gather and job.parallel.overlap_grad_reduce


def _gather_seconds(job: TrainingJob, stage: Stage) -> float:
    return _shared_seconds(job, stage, stage.weight_bytes)


def _shared_seconds(job: TrainingJob, stage: Stage, num_bytes: int) -> float:
    """An exchange of all that a stage's rank holds, between those that share the optimizer."""
    reach = job.world_size // job.parallel.pp  # from the first to the last of them
    dense = num_bytes * (1 - stage.expert_share)
    experts = num_bytes * stage.expert_share
    return ring_seconds(dense, job.num_copies, reach, job.hardware) + ring_seconds(
        experts, job.num_expert_copies, reach, job.hardware
    )


def sample_exchange_seconds(job: TrainingJob, workload: Workload) -> float:
    """What lies between verdicts and micro-batches: every rank gets the facts of all responses, and
    the plan of the packing, whose parts the ranks make in turn; tokens go to the replica that packs
    them, each of about log2(W) / 2 ranks on the way passing them on.
    """
    world, hardware = job.world_size, job.hardware
    accepted = len(workload.accepted)
    planned_here = max(accepted / world, min(accepted, _PART))
    facts = len(workload.lengths) * _FACTS_SECONDS + accepted * _PLAN_SECONDS
    facts += planned_here * _PACKING_SECONDS
    facts += ring_seconds(len(workload.lengths) * _FACTS_BYTES, world, world, hardware)
    tokens = workload.trained_tokens / job.dp
    passed_on = tokens * _TOKEN_BYTES * max(1.0, math.log2(world) / 2)
    return facts + tokens * _TOKEN_SECONDS + ring_seconds(passed_on, world, world, hardware)


def training_flops(job: TrainingJob, workload: Workload) -> float:
    """All ranks' forward and backward passes, recomputation not counted: what MFU is about."""
    lengths = [workload.prompt_tokens + n for n in workload.accepted]
    return 3 * forward_flops(job.shape, lengths, sum(workload.accepted))
