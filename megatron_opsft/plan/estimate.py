"""A whole run: does it fit, how long does a step take, what does it cost; pure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_opsft.architectures.flops import forward_flops
from megatron_opsft.plan.job import TrainingJob
from megatron_opsft.plan.memory import (
    RankMemory,
    engine_memory,
    kv_bytes_per_token,
    rank_memory,
    reference_is_on_device,
)
from megatron_opsft.plan.rollout import (
    RolloutEstimate,
    estimate_rollout,
    sync_seconds,
    verify_seconds,
)
from megatron_opsft.plan.stages import Stage, count_stages
from megatron_opsft.plan.training import (
    TrainingEstimate,
    estimate_training,
    reference_seconds,
)
from megatron_opsft.plan.workload import Workload

# Of a device's memory that is to stay free: the formulas are not better than that.
SAFE_SHARE = 0.05
# Of a parameter in a checkpoint: float32 main weight and two moments.
_STATE_BYTES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """Seconds of a step by phase, by the names of metrics.jsonl. reference, old_logprob: passes of
    the reference model and of the policy that sampled, where the method asks for them.
    """

    sampling: RolloutEstimate
    training: TrainingEstimate
    verify: float
    reference: float
    old_logprob: float
    sync: float

    @property
    def rollout(self) -> float:
        return self.sampling.prefill + self.sampling.decode

    @property
    def train(self) -> float:
        return self.training.total

    @property
    def total(self) -> float:
        scored = self.reference + self.old_logprob
        return self.rollout + self.verify + scored + self.train + self.sync


def estimate_step(job: TrainingJob, workload: Workload, stages: Sequence[Stage]) -> StepEstimate:
    """stages: of `count_stages`."""
    training = estimate_training(job, stages, workload)
    return StepEstimate(
        sampling=estimate_rollout(job, workload),
        training=training,
        verify=verify_seconds(job, workload),
        reference=reference_seconds(job, stages, training.score),
        old_logprob=training.score if job.scores_before else 0.0,
        sync=sync_seconds(job, stages),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEstimate:
    """total_bytes: on disk. saved_bytes: that the ranks of a node write, and hold in host memory
    beside what the processes hold anyway while they do. resume_bytes: that the ranks of a node
    read, once to check the files and once without the weights that follow from main weights.

    bandwidth: of a node's storage, bytes a second; a save takes its time in the background.
    """

    total_bytes: int
    saved_bytes: int
    resume_bytes: int
    bandwidth: float


def estimate_checkpoint(job: TrainingJob, stages: Sequence[Stage]) -> CheckpointEstimate:
    """As `model.checkpoint_share`: every rank writes and reads what it updates."""
    of_weight = 0 if job.dtype_bytes == 4 else job.dtype_bytes  # in float32 it is the main weight
    experts = [stage.expert_parameters for stage in stages]
    dense = [stage.num_parameters - stage.expert_parameters for stage in stages]
    updated = job.ranks_per_node * max(
        d / job.num_copies + e / job.num_expert_copies for d, e in zip(dense, experts, strict=True)
    )
    parallel = job.parallel
    elements = parallel.tp * sum(dense) + parallel.expert_tp * parallel.ep * sum(experts)
    total = elements * (_STATE_BYTES + of_weight)
    # Files are checked by all ranks in turn, whoever reads them afterwards.
    checked = total * job.ranks_per_node // job.world_size
    return CheckpointEstimate(
        total_bytes=total,
        saved_bytes=int(updated * (_STATE_BYTES + of_weight)),
        resume_bytes=checked + int(updated * _STATE_BYTES),
        bandwidth=job.hardware.storage_bandwidth * job.ranks_per_node,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEstimate:
    """All that is said about a job. memory: of every pipeline stage.

    kv_tokens: that one engine's cache holds. problems: why it does not fit. reference_host_bytes:
    of the reference model, in a node's CPU memory.
    """

    job: TrainingJob
    memory: list[RankMemory]
    workload: Workload
    step: StepEstimate
    kv_tokens: int
    checkpoint: CheckpointEstimate
    num_steps: int
    problems: list[str]
    reference_host_bytes: int

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def is_safe(self) -> bool:
        """Whether it fits with `SAFE_SHARE` to spare: what a search proposes."""
        return self.fits and self.worst.margin >= SAFE_SHARE * self.worst.limit

    @property
    def worst(self) -> RankMemory:
        """The rank with the least room."""
        return min(self.memory, key=lambda rank: rank.margin)

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        return sum(rank.stage.whole_parameters for rank in self.memory)

    @property
    def tokens_per_second(self) -> float:
        """Sampled ones, over the whole step."""
        return self.workload.sampled_tokens / self.step.total

    def utilization(self, seconds: float) -> float:
        """MFU: the GEMMs of the training passes over peak, recomputation not counted."""
        peak = self.job.hardware.peak_flops * self.job.world_size
        trained = self.workload.trained
        done = 3 * forward_flops(self.job.shape, self.workload.sequences, sum(trained))
        return done / (seconds * peak) if trained else 0.0

    @property
    def device_hours(self) -> float:
        """The whole run's, evaluation and checkpoints left out."""
        return self.step.total * self.num_steps * self.job.world_size / 3600

    @property
    def price(self) -> float:
        """Dollars."""
        return self.device_hours * self.job.hardware.price_per_hour

    @property
    def bottleneck(self) -> str:
        """The longest phase, its share of a step, and what it does."""
        step, sampling, training = self.step, self.step.sampling, self.step.training
        fixed = sampling.fixed / sampling.decode if sampling.decode else 0.0
        reasons = {
            "rollout": f"{sampling.slots} responses at once in an engine, {fixed:.0%} of decoding "
            "is a fixed cost of each token's step",
            "verify": "too few CPU cores for the answers",
            "reference": "passes that score all responses",
            "old_logprob": "passes that score all responses",
            "train": f"GEMMs at {self.utilization(step.train):.0%} of peak, bubbles "
            f"{training.bubble:.0%}, exchange {training.exchange:.2f} s",
            "sync": "weights between trainer and engines",
        }
        name = max(reasons, key=lambda phase: float(getattr(step, phase)))
        return f"{name}, {getattr(step, name) / step.total:.0%} of a step: {reasons[name]}"


def estimate_run(job: TrainingJob, workload: Workload, num_steps: int) -> RunEstimate:
    """The job has passed `check_job`."""
    stages = count_stages(job)
    step = estimate_step(job, workload, stages)
    of_update = step.training.num_microbatches // job.config.method.num_updates
    memory = [rank_memory(job, stage, max(1, of_update)) for stage in stages]
    kv_tokens = int(max(0.0, engine_memory(job).kv_cache) / kv_bytes_per_token(job))
    on_host = [
        stage.weight_bytes
        for stage in stages
        if job.keeps_reference and not reference_is_on_device(job, stage)
    ]
    return RunEstimate(
        job=job,
        memory=memory,
        workload=workload,
        step=step,
        kv_tokens=kv_tokens,
        checkpoint=estimate_checkpoint(job, stages),
        num_steps=num_steps,
        problems=_problems(job, memory, kv_tokens),
        reference_host_bytes=job.ranks_per_node * max(on_host, default=0),
    )


def _problems(job: TrainingJob, memory: list[RankMemory], kv_tokens: int) -> list[str]:
    """Why it does not fit; empty where it does."""
    problems = []
    for phase, fix in (
        ("rollout", "lower rollout.gpu_memory_fraction or raise parallel.tp or pp"),
        (
            "train",
            "raise parallel.tp or train.recompute, or lower train.max_tokens_per_microbatch",
        ),
        ("sync", "raise rollout.tp or lower sync.bucket_mb"),
    ):
        rank = max(memory, key=lambda one: one.phases[phase])
        over = rank.phases[phase] - rank.limit
        if over > 0:
            problems.append(
                f"{phase}: stage {rank.stage.index} needs {over / 1e9:.1f} GB more than the "
                f"{rank.limit / 1e9:.1f} of a device; {fix}"
            )
    if job.engine.refills and kv_tokens < job.max_sequence_tokens:
        problems.append(
            f"rollout: the engine's cache holds {kv_tokens} tokens, fewer than one sequence of "
            f"{job.max_sequence_tokens}; raise rollout.gpu_memory_fraction or rollout.tp"
        )
    return problems


def run_as_json(run: RunEstimate) -> dict[str, Any]:
    """One JSON object: bytes, seconds, shares and dollars."""
    job, step = run.job, run.step
    summed = {"rollout": step.rollout, "train": step.train, "total": step.total}
    return {
        "fits": run.fits,
        "is_safe": run.is_safe,
        "problems": run.problems,
        "world_size": job.world_size,
        "device": job.hardware.name,
        **job.parallel.model_dump(),
        "etp": job.parallel.expert_tp,
        "dp": job.dp,
        "recompute": job.config.train.recompute,
        "rollout_tp": job.engine_tp,
        "num_engines": job.num_engines,
        "cross_entropy": job.cross_entropy.method,
        "parameters": run.num_parameters,
        "stages": [{**asdict(rank), **rank.phases, "margin": rank.margin} for rank in run.memory],
        "margin_bytes": run.worst.margin,
        "checkpoint": asdict(run.checkpoint),
        "host_bytes_per_node": job.host_bytes_per_node,
        "reference_host_bytes": run.reference_host_bytes,
        "kv_tokens": run.kv_tokens,
        "slots": step.sampling.slots,
        "num_microbatches": step.training.num_microbatches,
        "seconds": {**asdict(step), **summed},
        "tokens_per_second": run.tokens_per_second,
        "mfu": run.utilization(step.train),
        "step_mfu": run.utilization(step.total),
        "bottleneck": run.bottleneck,
        "steps": run.num_steps,
        "device_hours": run.device_hours,
        "price": run.price,
        "method": job.config.method.name,
        "num_updates": job.config.method.num_updates,
        "mean_response_tokens": run.workload.mean_tokens,
        "num_accepted": len(run.workload.trained),
    }
