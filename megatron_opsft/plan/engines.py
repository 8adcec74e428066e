"""What each rollout engine of a job is asked for, and how long it takes; pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_opsft.config import ParallelConfig, TrainConfig
from megatron_opsft.plan.cores import shared_ends
from megatron_opsft.plan.decoding import Segment, refilled_segments, static_segments
from megatron_opsft.plan.job import TrainingJob
from megatron_opsft.plan.lengths import Workload
from megatron_opsft.plan.memory import engine_memory, kv_bytes_per_token
from megatron_opsft.plan.seconds import (
    decode_step_overhead,
    decode_step_seconds,
    engine_sizes,
    prefill_seconds,
)
from megatron_opsft.rollout.requests import deal_evenly

Share = tuple[int, ...]
"""Tokens of the responses that one engine is asked for."""


def engine_shares(job: TrainingJob, workload: Workload) -> list[Share]:
    """The lengths that each engine is asked for, as the run's sampler deals them; empty where one
    gets no work.
    """
    size, lengths = job.config.rollout.group_size, workload.lengths
    groups = [lengths[i : i + size] for i in range(0, len(lengths), size)]
    return [tuple(part) for part in deal_evenly(groups, job.num_engines)]


def num_slots(job: TrainingJob, workload: Workload, shares: Sequence[Share]) -> int:
    """Responses that one engine decodes at once: rollout.batch_size, or as many as the cache holds
    at the mean length (vLLM puts the others off).
    """
    batch = min(job.config.rollout.batch_size, max(map(len, shares)))
    if not job.engine.refills:
        return batch
    mean = workload.prompt_tokens + workload.sampled_tokens / len(workload.lengths)
    room = engine_memory(job).kv_cache / (kv_bytes_per_token(job) * mean)
    return max(1, min(batch, int(room)))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSeconds:
    """What an engine does with its share; overhead: the part of `decode` that reads nothing."""

    prefill: float
    decode: float
    overhead: float

    @property
    def total(self) -> float:
        return self.prefill + self.decode


def engine_seconds(job: TrainingJob, workload: Workload, share: Share, slots: int) -> EngineSeconds:
    """One engine that is asked for these lengths, alone on its cores."""
    sizes = engine_sizes(job.shape, job.engine_tp, job.dtype_bytes)
    segments: list[Segment]
    if job.engine.refills:
        segments = refilled_segments(share, workload.prompt_tokens, slots)
    else:
        segments = static_segments(share, workload.prompt_tokens, slots, workload.limit)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEstimate:
    """Seconds of the phases before training. prefill, decode: of the slowest engine, verify: of the
    rank that has most to verify; tail: that a rank waits for these, mean over the ranks.

    decode_overhead: share of decoding that reads nothing. slots: see `num_slots`.
    """

    prefill: float
    decode: float
    decode_overhead: float
    verify: float
    tail: float
    slots: int


NOTHING_SAMPLED = RolloutEstimate(
    prefill=0.0, decode=0.0, decode_overhead=0.0, verify=0.0, tail=0.0, slots=0
)


def estimate_rollout(job: TrainingJob, workload: Workload) -> RolloutEstimate:
    """All engines decode, then all ranks verify; with fixed data there is nothing to do."""
    if not workload.lengths:
        return NOTHING_SAMPLED
    # The trainer's layout plays no part: a search meets the same few rollouts again and again.
    # Nor do speculative tokens, whose settings no cache could take for a key.
    rollout = job.config.rollout.model_copy(update={"speculative": None})
    rest = {"parallel": ParallelConfig(), "train": TrainConfig(), "rollout": rollout}
    return _estimate(replace(job, config=job.config.model_copy(update=rest)), workload)


@lru_cache(maxsize=32)
def _estimate(job: TrainingJob, workload: Workload) -> RolloutEstimate:
    shares = engine_shares(job, workload)
    slots = num_slots(job, workload, shares)
    engines = [engine_seconds(job, workload, share, slots) for share in shares]
    ends = shared_ends(
        [engine.total for engine in engines], [job.engine_tp] * len(engines), job.compute_cores
    )
    slowest = max(range(len(engines)), key=ends.__getitem__)
    engine = engines[slowest]
    crowding = ends[slowest] / engine.total if engine.total else 1.0
    verified = _verify_seconds(job, _to_verify(shares, workload.limit, job.world_size))
    busy = (sum(ends) * job.engine_tp + sum(verified)) / job.world_size
    return RolloutEstimate(
        prefill=engine.prefill * crowding,
        decode=engine.decode * crowding,
        decode_overhead=engine.overhead / engine.decode if engine.decode else 0.0,
        verify=max(verified),
        tail=ends[slowest] + max(verified) - busy,
        slots=slots,
    )


def _to_verify(shares: Sequence[Share], limit: int, world_size: int) -> list[int]:
    """Finished responses that each rank verifies: its own engine's, or its part of all
    (`rollout.sample.Sampler`). Those that hit the limit are not verified.
    """
    if len(shares) == world_size:
        return [sum(n < limit for n in share) for share in shares]
    finished = [n < limit for share in shares for n in share]
    return [sum(finished[rank::world_size]) for rank in range(world_size)]


def _verify_seconds(job: TrainingJob, counts: Sequence[int]) -> list[float]:
    """Seconds of each rank. On a CPU the verifiers, at least one process for each rank
    (`verify.cores.share_of_cores`), are on the cores that the ranks compute on.
    """
    one = job.hardware.verify_seconds
    if job.hardware.is_cuda:
        return [count * one / job.cores_per_rank for count in counts]
    workers = job.config.verify.workers or max(1, int(job.cores_per_rank))
    widths = [max(1, min(workers, count)) for count in counts]
    seconds = [count * one / width for count, width in zip(counts, widths, strict=True)]
    return shared_ends(seconds, widths, job.compute_cores)
