"""One step of a job in seconds, from the functions of `seconds`; pure, no Megatron."""

from dataclasses import dataclass
from math import ceil

from megatron_opsft.plan.job import Job
from megatron_opsft.plan.lengths import Segment, Workload, decode_segments
from megatron_opsft.plan.memory import (
    RankMemory,
    Stage,
    engine_weight_elements,
    kv_bytes_per_token,
    whole_elements,
)
from megatron_opsft.plan.seconds import (
    EngineSizes,
    decode_bytes,
    decode_step_overhead,
    decode_step_seconds,
    engine_sizes,
    microbatch_seconds,
    optimizer_seconds,
    pipeline_seconds,
    prefill_seconds,
    push_seconds,
    ring_seconds,
    verify_seconds,
)
from megatron_opsft.weights.architectures.flops import forward_flops

# How full micro-batches get (`objective.packing`; the metric packing_efficiency of real runs).
_PACKING = 0.95


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
    prefill, decode, overhead = rollout_seconds(job, memory[0], workload)
    train, exchange, update, bubble = train_seconds(job, stages, workload)
    finished = sum(n < workload.limit for n in workload.lengths)
    cores = job.world_size * job.hardware.cpu_cores
    return StepSeconds(
        prefill=prefill,
        decode=decode,
        decode_overhead=overhead / decode if decode else 0.0,
        verify=verify_seconds(finished, cores, job.hardware),
        train=train,
        exchange=exchange,
        update=update,
        bubble=bubble,
        push=_push(job, stages),
    )


def num_slots(job: Job, memory: RankMemory, workload: Workload) -> int:
    """Responses that one engine decodes at once: rollout.batch_size, or as many as the cache holds
    at the mean length (vLLM puts the others off).
    """
    batch = min(job.config.rollout.batch_size, -(-len(workload.lengths) // job.num_engines))
    if job.config.rollout.engine == "hf":
        return batch
    mean = workload.prompt_tokens + workload.sampled_tokens / len(workload.lengths)
    return max(1, min(batch, int(memory.kv_cache / (kv_bytes_per_token(job) * mean))))


def engine_segments(job: Job, workload: Workload, slots: int) -> list[list[Segment]]:
    """Of each engine that has work: all responses to a problem go to one engine, problems are dealt
    out in turn (`rollout.engine.my_share`). The Hugging Face engine's share is cut by responses.
    """
    group = job.config.rollout.group_size
    if job.config.rollout.engine == "hf":
        group = max(1, min(group, len(workload.lengths) // job.num_engines))
    groups = [workload.lengths[i : i + group] for i in range(0, len(workload.lengths), group)]
    shares = [groups[e :: job.num_engines] for e in range(min(job.num_engines, len(groups)))]
    refill = job.config.rollout.engine == "vllm"
    return [
        decode_segments([n for g in share for n in g], workload.prompt_tokens, slots, refill=refill)
        for share in shares
    ]


def rollout_seconds(job: Job, memory: RankMemory, workload: Workload) -> tuple[float, float, float]:
    """(prefill, decode, decode steps' overhead in it) of the slowest engine."""
    engine = engine_sizes(job.shape, job.engine_tp, job.dtype_bytes)
    slots = num_slots(job, memory, workload)
    decoding = [
        (_decode_seconds(job, engine, segments), sum(s.num_steps for s in segments))
        for segments in engine_segments(job, workload, slots)
    ]
    slowest, steps = max(decoding)
    problems = -(-job.config.data.prompts_per_step // job.num_engines)
    prefill = prefill_seconds(
        job.shape, job.hardware, workload.prompt_tokens, problems, job.engine_tp
    )
    return prefill, slowest, steps * decode_step_overhead(engine, job.hardware)


def _decode_seconds(job: Job, engine: EngineSizes, segments: list[Segment]) -> float:
    return sum(
        s.num_steps * decode_step_seconds(engine, job.hardware, s.batch, s.context)
        for s in segments
    )


def decode_work(job: Job, memory: RankMemory, workload: Workload) -> tuple[float, int]:
    """(bytes read, steps) of the engine that reads most, for calibration."""
    engine = engine_sizes(job.shape, job.engine_tp, job.dtype_bytes)
    slots = num_slots(job, memory, workload)
    return max(
        (
            sum(s.num_steps * decode_bytes(engine, s.batch, s.context) for s in segments),
            sum(s.num_steps for s in segments),
        )
        for segments in engine_segments(job, workload, slots)
    )


def train_seconds(
    job: Job, stages: list[Stage], workload: Workload
) -> tuple[float, float, float, float]:
    """(all of it, exchange of gradients that nothing hides, update, share of bubbles)."""
    count = num_microbatches(job, workload)
    passes = [_microbatch(job, stage, workload, count) for stage in stages]
    busy = [count * p for p in passes]
    pipeline = pipeline_seconds(passes, count, job.parallel.vpp or 1)
    exchange = 0.0
    reach = min(job.world_size, job.dp * job.parallel.tp)
    for stage, one in zip(stages, passes, strict=True):
        seconds = ring_seconds(stage.gradient_bytes, job.dp, reach, job.hardware)
        if not job.parallel.overlap_param_gather or not job.parallel.overlap_grad_reduce:
            seconds += ring_seconds(stage.weight_bytes, job.dp, reach, job.hardware)
        if job.parallel.overlap_grad_reduce:
            seconds = max(0.0, seconds - one * 2 / 3)  # behind the last backward pass
        exchange = max(exchange, seconds)
    update = max(optimizer_seconds(s.num_parameters, job.dp, job.hardware) for s in stages)
    bubble = 1 - sum(busy) / len(busy) / pipeline
    return pipeline + exchange + update, exchange, update, bubble


def _microbatch(job: Job, stage: Stage, workload: Workload, count: int) -> float:
    """Seconds of an average micro-batch on a stage, both passes."""
    if not workload.accepted:
        return 0.0
    sequences = len(workload.accepted) / job.dp / count
    length = workload.trained_tokens / len(workload.accepted)
    # Attention's square is that of the mean sequence; a part of one counts as that part.
    whole, part = int(sequences), sequences - int(sequences)
    one = microbatch_seconds(
        job.shape,
        job.hardware,
        num_layers=stage.num_layers,
        lengths=[round(length)] * whole + [round(length * part)] * (part > 0),
        num_loss_tokens=round(sum(workload.accepted) / job.dp / count) * stage.has_output,
        tp=job.parallel.tp,
        pp=job.parallel.pp,
        dtype_bytes=job.dtype_bytes,
        recompute=job.config.train.recompute,
    )
    return one.total


def training_flops(job: Job, workload: Workload) -> float:
    """Of all ranks' forward and backward passes, recomputation not counted: what MFU is about."""
    lengths = [workload.prompt_tokens + n for n in workload.accepted]
    return 3 * forward_flops(job.shape, lengths, sum(workload.accepted))


def _push(job: Job, stages: list[Stage]) -> float:
    received, across = push_bytes(job)
    seconds = push_seconds(received, job.hardware, world_size=job.world_size, across_nodes=across)
    if job.parallel.overlap_param_gather and job.parallel.overlap_grad_reduce:
        # The gather of the updated weights, which the push waits for.
        reach = min(job.world_size, job.dp * job.parallel.tp)
        seconds += max(ring_seconds(s.weight_bytes, job.dp, reach, job.hardware) for s in stages)
    return seconds


def push_bytes(job: Job) -> tuple[float, float]:
    """(bytes that a rank receives, share of them from other nodes). Of what its engine wants a rank
    holds about 1 / (tp x pp) itself; other pipeline stages are on other nodes as soon as one stage
    fills a node.
    """
    if job.config.rollout.engine == "vllm":
        wanted = engine_weight_elements(job.shape, job.config.rollout.tp) * job.dtype_bytes
    else:
        wanted = whole_elements(job.shape) * job.dtype_bytes
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
