"""What each rollout engine of a job is asked for, and how long it takes; pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_opsft.plan.decoding import Segment, refilled_segments, static_segments
from megatron_opsft.plan.job import Job
from megatron_opsft.plan.lengths import Workload
from megatron_opsft.plan.memory import RankMemory, kv_bytes_per_token
from megatron_opsft.plan.seconds import (
    decode_bytes,
    decode_step_overhead,
    decode_step_seconds,
    engine_sizes,
    prefill_seconds,
)
from megatron_opsft.rollout.engine import dealt_size


def num_slots(job: Job, memory: RankMemory, workload: Workload) -> int:
    """Responses that one engine decodes at once: rollout.batch_size, or as many as the cache holds
    at the mean length (vLLM puts the others off).
    """
    largest_share = max(len(share) for share in engine_shares(job, workload))
    batch = min(job.config.rollout.batch_size, largest_share)
    if not job.engine.refills:
        return batch
    mean = workload.prompt_tokens + workload.sampled_tokens / len(workload.lengths)
    return max(1, min(batch, int(memory.kv_cache / (kv_bytes_per_token(job) * mean))))


def engine_shares(job: Job, workload: Workload) -> list[tuple[int, ...]]:
    """The lengths that each engine is asked for; empty where one gets no work.

    As `rollout.engine.my_share` deals them: all responses to a problem go to one engine, problems
    in turn; the Hugging Face engine's in whole batches, or in smaller ones for all to be busy.
    """
    rollout, lengths = job.config.rollout, workload.lengths
    together = rollout.group_size
    if not job.engine.refills:
        together = dealt_size(len(lengths), rollout.batch_size, job.num_engines)
    parts = [lengths[i : i + together] for i in range(0, len(lengths), together)]
    return [
        tuple(n for part in parts[engine :: job.num_engines] for n in part)
        for engine in range(job.num_engines)
    ]


def engine_segments(
    job: Job, workload: Workload, share: Sequence[int], slots: int
) -> list[Segment]:
    """The decoding steps of an engine that is asked for these lengths."""
    if not job.engine.refills:
        return static_segments(share, workload.prompt_tokens, slots, workload.limit)
    return refilled_segments(share, workload.prompt_tokens, slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSeconds:
    """What an engine does with its share; overhead: the part of `decode` that reads nothing."""

    prefill: float
    decode: float
    overhead: float

    @property
    def total(self) -> float:
        return self.prefill + self.decode


def engine_seconds(job: Job, workload: Workload, share: Sequence[int], slots: int) -> EngineSeconds:
    """Of one engine that is asked for these lengths."""
    sizes = engine_sizes(job.shape, job.engine_tp, job.dtype_bytes)
    segments = engine_segments(job, workload, share, slots)
    # The responses to a problem share its prompt.
    problems = -(-len(share) // job.config.rollout.group_size)
    return EngineSeconds(
        prefill=prefill_seconds(
            job.shape, job.hardware, workload.prompt_tokens, problems, job.engine_tp
        ),
        decode=sum(
            s.num_steps * decode_step_seconds(sizes, job.hardware, s.batch, s.context)
            for s in segments
        ),
        overhead=sum(s.num_steps for s in segments) * decode_step_overhead(sizes, job.hardware),
    )


def rollout_seconds(job: Job, memory: RankMemory, workload: Workload) -> EngineSeconds:
    """Of the slowest engine."""
    slots = num_slots(job, memory, workload)
    engines = (
        engine_seconds(job, workload, share, slots) for share in engine_shares(job, workload)
    )
    return max(engines, key=lambda engine: engine.total)


def decode_work(job: Job, memory: RankMemory, workload: Workload) -> tuple[float, int]:
    """(bytes read, steps) of the engine that reads most, for calibration."""
    sizes = engine_sizes(job.shape, job.engine_tp, job.dtype_bytes)
    slots = num_slots(job, memory, workload)
    return max(
        (
            sum(s.num_steps * decode_bytes(sizes, s.batch, s.context) for s in segments),
            sum(s.num_steps for s in segments),
        )
        for share in engine_shares(job, workload)
        for segments in [engine_segments(job, workload, share, slots)]
    )
