"""One step of a job in seconds, from the functions of `seconds`; pure, no Megatron."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from megatron_opsft.architectures.flops import forward_flops
from megatron_opsft.plan.engines import rollout_seconds
from megatron_opsft.plan.job import Job
from megatron_opsft.plan.lengths import Workload
from megatron_opsft.plan.memory import (
    RankMemory,
    Stage,
    engine_elements,
)
from megatron_opsft.plan.seconds import (
    PassSeconds,
    microbatch_seconds,
    optimizer_seconds,
    pipeline_seconds,
    push_seconds,
    ring_seconds,
    verify_seconds,
)

# How full micro-batches get (`batching.packing`; the metric packing_efficiency of real runs).
_PACKING = 0.95
# Of one token of an accepted sample: what pickle makes of its id, and unpickling and packing it
# (measured on one core).
_SAMPLE_BYTES = 4.1
_SAMPLE_SECONDS = 60e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """One step, phase by phase; `rollout` = prefill + decode, `train` includes `exchange` (of
    gradients, what no backward pass hides) and `update`.

    bubble: share of the pipeline's time that a rank waits in it; decode_overhead: share of decoding
    that reads nothing.
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

    @property
    def rollout(self) -> float:
        return self.prefill + self.decode

    @property
    def total(self) -> float:
        return self.rollout + self.verify + self.train + self.push


def num_microbatches(job: Job, workload: Workload) -> int:
    """Of a step on each data-parallel rank: enough for the accepted tokens, and with virtual stages
    a multiple of the pipeline.
    """
    budget = _PACKING * job.config.train.max_tokens_per_microbatch
    needed = max(1, ceil(workload.trained_tokens / job.dp / budget))
    multiple = job.parallel.pp if job.parallel.vpp else 1
    return -(-needed // multiple) * multiple


def predict_step(
    job: Job, stages: list[Stage], memory: list[RankMemory], workload: Workload
) -> StepSeconds:
    """stages, memory: of every pipeline stage."""
    rollout = rollout_seconds(job, memory[0], workload)
    train, exchange, update, bubble = train_seconds(job, stages, workload)
    finished = sum(n < workload.limit for n in workload.lengths)
    cores = job.cores_per_node * job.world_size / job.ranks_per_node
    return StepSeconds(
        prefill=rollout.prefill,
        decode=rollout.decode,
        decode_overhead=rollout.overhead / rollout.decode if rollout.decode else 0.0,
        verify=verify_seconds(finished, cores, job.hardware),
        train=train,
        exchange=exchange,
        update=update,
        bubble=bubble,
        push=push_phase_seconds(job, stages),
    )


def train_seconds(
    job: Job, stages: list[Stage], workload: Workload
) -> tuple[float, float, float, float]:
    """(all of it, exchange of gradients that nothing hides, update, share of bubbles)."""
    count = num_microbatches(job, workload)
    passes = [_microbatch(job, stage, workload, count) for stage in stages]
    busy = [count * p.total for p in passes]
    pipeline = pipeline_seconds([p.total for p in passes], count, job.parallel.vpp or 1)
    exchange = max(
        reduce_seconds(job, stage, one.backward) + gather_in_train_seconds(job, stage)
        for stage, one in zip(stages, passes, strict=True)
    )
    update = max(optimizer_seconds(s.num_parameters, job.dp, job.hardware) for s in stages)
    # Where nothing is accepted, nothing waits.
    bubble = 1 - sum(busy) / len(busy) / pipeline if pipeline else 0.0
    exchange += sample_exchange_seconds(job, workload)
    return pipeline + exchange + update, exchange, update, bubble


def reduce_seconds(job: Job, stage: Stage, last_backward: float) -> float:
    """Of the gradients over the data-parallel ranks: what does not hide behind the last backward
    pass.
    """
    seconds = ring_seconds(stage.gradient_bytes, job.dp, _reach(job), job.hardware)
    return max(0.0, seconds - last_backward) if job.parallel.overlap_grad_reduce else seconds


def gather_in_train_seconds(job: Job, stage: Stage) -> float:
    """Of the updated weights, where the trainer waits for them; otherwise the push does."""
    return 0.0 if _gather_overlaps(job) else _gather_seconds(job, stage)


def _gather_overlaps(job: Job) -> bool:
    return job.parallel.overlap_param_gather and job.parallel.overlap_grad_reduce


def _gather_seconds(job: Job, stage: Stage) -> float:
    return ring_seconds(stage.weight_bytes, job.dp, _reach(job), job.hardware)


def _reach(job: Job) -> int:
    """Ranks from the first to the last of a data-parallel group."""
    return job.dp * job.parallel.tp


def _microbatch(job: Job, stage: Stage, workload: Workload, count: int) -> PassSeconds:
    """An average micro-batch on a stage."""
    if not workload.accepted:
        return PassSeconds(forward=0.0, backward=0.0)
    sequences = len(workload.accepted) / job.dp / count
    length = workload.trained_tokens / len(workload.accepted)
    # Attention's square is that of the mean sequence; a part of one counts as that part.
    whole, part = int(sequences), sequences - int(sequences)
    lengths = [round(length)] * whole + [round(length * part)] * (part > 0)
    return stage_pass(job, stage, lengths, round(sum(workload.accepted) / job.dp / count))


def sample_exchange_seconds(job: Job, workload: Workload) -> float:
    """Every rank gets every accepted sample, and makes Python objects of it."""
    tokens = workload.trained_tokens
    sent = ring_seconds(tokens * _SAMPLE_BYTES, job.world_size, job.world_size, job.hardware)
    return sent + tokens * _SAMPLE_SECONDS


def stage_pass(job: Job, stage: Stage, lengths: Sequence[int], num_loss_tokens: int) -> PassSeconds:
    """A micro-batch of sequences of these lengths on a rank of a stage; num_loss_tokens: in it,
    whether the stage has the output layer or not.
    """
    return microbatch_seconds(
        job.shape,
        job.hardware,
        num_layers=stage.num_layers,
        lengths=lengths,
        num_loss_tokens=num_loss_tokens * stage.has_output,
        tp=job.parallel.tp,
        pp=job.parallel.pp,
        stage_ranks=job.world_size // job.parallel.pp,
        dtype_bytes=job.dtype_bytes,
        recompute=job.config.train.recompute,
    )


def training_flops(job: Job, workload: Workload) -> float:
    """Of all ranks' forward and backward passes, recomputation not counted: what MFU is about."""
    lengths = [workload.prompt_tokens + n for n in workload.accepted]
    return 3 * forward_flops(job.shape, lengths, sum(workload.accepted))


def push_phase_seconds(job: Job, stages: list[Stage]) -> float:
    """The push, and before it the gather of the updated weights where it waits for that."""
    received, across = push_bytes(job)
    seconds = push_seconds(received, job.hardware, world_size=job.world_size, across_nodes=across)
    if _gather_overlaps(job):
        seconds += max(_gather_seconds(job, stage) for stage in stages)
    return seconds


def push_bytes(job: Job) -> tuple[float, float]:
    """(bytes that a rank receives, share of them from other nodes). Of what its engine wants a rank
    holds about 1 / (tp x pp) itself; other pipeline stages are on other nodes as soon as one stage
    fills a node.
    """
    wanted = engine_elements(job) * job.dtype_bytes
    model_ranks = job.parallel.tp * job.parallel.pp
    received = wanted * (1 - 1 / model_ranks)
    stage_ranks = job.world_size // job.parallel.pp
    node = job.hardware.gpus_per_node
    across = 0.0
    if job.world_size > node and stage_ranks >= node:
        across = (job.parallel.pp - 1) / job.parallel.pp
    elif job.world_size > node:
        across = 1 - node / job.world_size
    return received, across
