"""A whole run: does it fit, how long does a step take, what does it cost; pure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_opsft.plan.checkpoint import CheckpointEstimate, estimate_checkpoint
from megatron_opsft.plan.job import TrainingJob
from megatron_opsft.plan.lengths import Workload
from megatron_opsft.plan.memory import (
    RankMemory,
    Stage,
    engine_memory,
    kv_bytes_per_token,
    rank_memory,
)
from megatron_opsft.plan.reference import reference_host_bytes, with_reference
from megatron_opsft.plan.step import StepEstimate, estimate_step
from megatron_opsft.plan.training import training_flops

# Of a device's memory that is to stay free: the formulas are not better than that.
SAFE_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEstimate:
    """All that is said about a job. memory: of every pipeline stage.

    tokens_per_second: sampled, over the whole step; mfu: of the training phase; step_mfu: the same
    products over the whole step. kv_tokens: that one engine's cache holds. reference_host_bytes: of
    the reference model, in a node's CPU memory.
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
    def tokens_per_second(self) -> float:
        return self.workload.sampled_tokens / self.step.total

    @property
    def mfu(self) -> float:
        return self._utilization(self.step.train)

    @property
    def step_mfu(self) -> float:
        return self._utilization(self.step.total)

    def _utilization(self, seconds: float) -> float:
        peak = self.job.hardware.peak_flops * self.job.world_size
        done = training_flops(self.job, self.workload)
        return done / (seconds * peak) if done else 0.0

    @property
    def device_hours(self) -> float:
        """The whole run's, those of engines with their own devices included, evaluation and
        checkpoints left out.
        """
        return self.step.total * self.num_steps * self.job.world_size / 3600

    @property
    def price(self) -> float:
        """Dollars."""
        return self.device_hours * self.job.hardware.price_per_hour

    @property
    def bottleneck(self) -> str:
        """The longest phase, and what takes it longest."""
        step = self.step
        phases = ("rollout", "verify", "reference", "old_logprob", "train", "push")
        name = max(phases, key=lambda phase: float(getattr(step, phase)))
        share = getattr(step, name) / step.total
        return f"{name}, {share:.0%} of a step: {self._reason(name)}"

    def _reason(self, phase: str) -> str:
        step = self.step
        if phase == "rollout":
            if step.prefill > step.decode:
                return "prompts take longer than decoding"
            if step.decode_overhead > 0.5:
                return (
                    f"{step.decode_overhead:.0%} of decoding is a fixed cost of each token's step; "
                    "more responses to an engine would use it better"
                )
            return f"decoding reads weights and cache, {self.step.slots} responses at once"
        if phase == "train":
            if step.exchange > step.train / 3:
                return "the exchange of gradients"
            if step.bubble > 0.33:
                return f"{step.bubble:.0%} of the pipeline's time is waiting; use a smaller pp"
            return f"products, at {self.mfu:.0%} of peak"
        if phase == "verify":
            return "too few CPU cores for the answers"
        if phase in ("reference", "old_logprob"):
            return "passes that score all responses"
        return "weights between trainer and engines"


def estimate_run(
    job: TrainingJob, stages: Sequence[Stage], workload: Workload, num_steps: int
) -> RunEstimate:
    """stages: of `ranks.build_stages`, or of `stages.count_stages`."""
    step = estimate_step(job, workload, stages)
    num_microbatches = -(-step.num_microbatches // job.config.method.num_updates)
    memory = [
        with_reference(job, rank_memory(job, stage, max(1, num_microbatches))) for stage in stages
    ]
    kv_tokens = int(max(0.0, engine_memory(job).kv_cache) / kv_bytes_per_token(job))
    return RunEstimate(
        job=job,
        memory=memory,
        workload=workload,
        step=step,
        kv_tokens=kv_tokens,
        checkpoint=estimate_checkpoint(job, stages),
        num_steps=num_steps,
        problems=_problems(job, memory, kv_tokens),
        reference_host_bytes=reference_host_bytes(job, stages),
    )


def host_notes(run: RunEstimate) -> list[str]:
    """What the nodes' CPU memory is too small for: one line each. Devices decide whether a run
    fits, since how much CPU memory a node has is not theirs to say.
    """
    there = run.job.host_bytes_per_node
    needed = run.checkpoint.saved_bytes + run.reference_host_bytes
    if needed <= there:
        return []
    with_reference = run.reference_host_bytes > 0
    what = "a checkpoint and the reference model need" if with_reference else "a checkpoint needs"
    return [
        f"{what} {needed / 1e9:,.0f} GB of a node's host memory, of which there are "
        f"{there / 1e9:,.0f}; use more nodes"
    ]


def _problems(job: TrainingJob, memory: list[RankMemory], kv_tokens: int) -> list[str]:
    """Why it does not fit; empty where it does."""
    problems = []
    for phase, fix in (
        ("rollout", "lower rollout.gpu_memory_fraction or raise parallel.tp or pp"),
        (
            "train",
            "raise parallel.tp or train.recompute, or lower train.max_tokens_per_microbatch",
        ),
        ("push", "raise rollout.tp or lower sync.bucket_mb"),
    ):
        rank = max(memory, key=lambda one: getattr(one, phase))
        over = getattr(rank, phase) - rank.limit
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
    job = run.job
    stages = [
        {**asdict(rank), "margin": rank.margin, "in_phase": rank.fullest_phase}
        for rank in run.memory
    ]
    step = run.step
    seconds = {**asdict(step), "rollout": step.rollout, "total": step.total}
    return {
        "fits": run.fits,
        "is_safe": run.is_safe,
        "problems": run.problems,
        "world_size": job.world_size,
        "device": job.hardware.name,
        "tp": job.parallel.tp,
        "pp": job.parallel.pp,
        "cp": job.parallel.cp,
        "ep": job.parallel.ep,
        "etp": job.parallel.expert_tp,
        "vpp": job.parallel.vpp,
        "dp": job.dp,
        "sequence_parallel": job.sequence_parallel,
        "recompute": job.config.train.recompute,
        "rollout_tp": job.engine_tp,
        "num_engines": job.num_engines,
        "cross_entropy": job.cross_entropy.method,
        "parameters": sum(rank.stage.whole_parameters for rank in run.memory),
        "stages": stages,
        "margin_bytes": run.worst.margin,
        "checkpoint": asdict(run.checkpoint),
        "host_bytes_per_node": job.host_bytes_per_node,
        "kv_tokens": run.kv_tokens,
        "slots": seconds.pop("slots"),
        "num_microbatches": seconds.pop("num_microbatches"),
        "seconds": seconds,
        "tokens_per_second": run.tokens_per_second,
        "mfu": run.mfu,
        "step_mfu": run.step_mfu,
        "bottleneck": run.bottleneck,
        "steps": run.num_steps,
        "device_hours": run.device_hours,
        "price": run.price,
        "mean_response_tokens": run.workload.mean_tokens,
        "num_accepted": len(run.workload.accepted),
        "method": job.config.method.name,
        "num_updates": job.config.method.num_updates,
        "reference_host_bytes": run.reference_host_bytes,
    }
