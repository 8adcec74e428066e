"""Bytes and seconds of a checkpoint, after `model.checkpoint_share`: every rank writes and reads
what it updates; pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_opsft.plan.job import TrainingJob
from megatron_opsft.plan.memory import Stage

# Of a parameter: float32 main weight and two moments.
_STATE_BYTES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEstimate:
    """total_bytes: on disk. saved_bytes: that the ranks of a node write, and hold in host memory
    beside what the processes hold anyway while they do. resume_bytes: that the ranks of a node
    read, once to check the files and once without the weights that follow from main weights.

    Seconds: of the slowest node, at `storage_bandwidth`; a save takes its own in the background,
    the resume's come on top of a start.
    """

    total_bytes: int
    saved_bytes: int
    resume_bytes: int
    save_seconds: float
    resume_seconds: float


def estimate_checkpoint(job: TrainingJob, stages: Sequence[Stage]) -> CheckpointEstimate:
    """stages: every pipeline stage."""
    of_weight = 0 if job.dtype_bytes == 4 else job.dtype_bytes  # in float32 it is the main weight
    of_parameter = _STATE_BYTES + of_weight
    largest = job.ranks_per_node * max(_updated(job, stage) for stage in stages)
    saved = int(largest * of_parameter)
    experts = sum(stage.expert_parameters for stage in stages)
    dense = sum(stage.num_parameters for stage in stages) - experts
    parallel = job.parallel
    elements = parallel.tp * dense + parallel.expert_tp * parallel.ep * experts
    total = elements * of_parameter
    # Files are checked by all ranks in turn, whoever reads them afterwards.
    read = total * job.ranks_per_node // job.world_size + int(largest * _STATE_BYTES)
    rate = job.hardware.storage_bandwidth * job.ranks_per_node
    return CheckpointEstimate(
        total_bytes=total,
        saved_bytes=saved,
        resume_bytes=read,
        save_seconds=saved / rate,
        resume_seconds=read / rate,
    )


def _updated(job: TrainingJob, stage: Stage) -> float:
    """Elements that one rank of a stage updates."""
    dense = stage.num_parameters - stage.expert_parameters
    return dense / job.num_copies + stage.expert_parameters / job.num_expert_copies
