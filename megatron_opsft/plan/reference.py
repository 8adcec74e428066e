"""The reference model of a job, where its method has one: what it takes on a rank; pure."""

from collections.abc import Sequence
from dataclasses import replace

from megatron_opsft.plan.job import TrainingJob
from megatron_opsft.plan.memory import RankMemory, Stage, engine_memory

# Between a device and pinned memory of the host, one direction. Assumption: PCIe 5.
_HOST_BANDWIDTH = 40e9


def reference_is_on_device(job: TrainingJob, stage: Stage) -> bool:
    """As `model.reference` decides when trainer and engine are there: on a GPU only where it takes
    no more than a tenth of what is free.
    """
    if not job.hardware.is_cuda:
        return True
    taken = job.hardware.reserved_bytes + stage.resident_bytes + engine_memory(job).awake
    return 10 * stage.weight_bytes <= job.hardware.memory_bytes - taken


def with_reference(job: TrainingJob, rank: RankMemory) -> RankMemory:
    """The rank with a frozen copy of its weights in every phase, if that is on its device."""
    if not (job.keeps_reference and reference_is_on_device(job, rank.stage)):
        return rank
    num_bytes = rank.stage.weight_bytes
    return replace(
        rank,
        reference=num_bytes,
        rollout=rank.rollout + num_bytes,
        train=rank.train + num_bytes,
        push=rank.push + num_bytes,
    )


def reference_host_bytes(job: TrainingJob, stages: Sequence[Stage]) -> int:
    """What of it is in the CPU memory of the fullest node."""
    if not job.keeps_reference:
        return 0
    on_host = [s.weight_bytes for s in stages if not reference_is_on_device(job, s)]
    return job.ranks_per_node * max(on_host, default=0)


def exchange_seconds(job: TrainingJob, stages: Sequence[Stage]) -> float:
    """The weights of the slowest rank and the reference's in each other's place, and back."""
    return max(
        2
        * stage.weight_bytes
        * (
            4 / job.hardware.memory_bandwidth  # both are read, and both are written
            if reference_is_on_device(job, stage)
            else 2 / _HOST_BANDWIDTH
        )
        for stage in stages
    )
