"""A whole run: does it fit, how long does a step take, what does it cost; pure."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_opsft.commands.plan.job import Job
from megatron_opsft.commands.plan.memory import (
    RankMemory,
    checkpoint_bytes,
    kv_bytes_per_token,
    kv_cache_bytes,
    rank_memory,
    reference_bytes,
)
from megatron_opsft.commands.plan.seconds import (
    STEP_PHASES,
    busiest_engine,
    estimate_step,
    num_microbatches,
)
from megatron_opsft.models.architectures.shape import forward_flops
from megatron_opsft.rollout.limits import max_engine_tokens
from megatron_opsft.run.start.disk import DiskUse, disk_use

# Of a device's memory that is to stay free: the formulas are not better than that.
SAFE_SHARE = 0.05
# Of a plan, into its JSON.
_FIGURES = (
    *(
        "is_safe",
        "problems",
        "notes",
        "bottleneck",
        "checkpoint",
        "host_bytes_per_node",
    ),
    *(
        "reference_host_bytes",
        "pinned_bytes",
        "kv_tokens",
        "tokens_per_second",
        "device_hours",
    ),
    "price",
)
_FIXES = {
    "rollout": "lower rollout.gpu_memory_fraction or raise parallel.tp or pp",
    "train": "raise parallel.tp or train.recompute, or lower train.max_tokens_per_microbatch",
    "sync": "raise rollout.tp or lower sync.bucket_mb",
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that is said about a job, which has passed `check_job`. overrides: those of a search."""

    job: Job
    num_steps: int
    overrides: tuple[str, ...] = ()

    @cached_property
    def step(self) -> dict[str, float]:
        """Of `estimate_step`."""
        return estimate_step(self.job)

    @cached_property
    def memory(self) -> list[RankMemory]:
        """Of every pipeline stage."""
        count = max(1, num_microbatches(self.job))
        return [rank_memory(self.job, stage, count) for stage in self.job.stages]

    @cached_property
    def worst(self) -> RankMemory:
        """The rank with the least room."""
        return min(self.memory, key=lambda rank: rank.margin)

    @cached_property
    def checkpoint(self) -> dict[str, float]:
        """Of `checkpoint_bytes`."""
        return checkpoint_bytes(self.job)

    @cached_property
    def disk(self) -> DiskUse:
        """What the run writes."""
        return disk_use(self.job.config, self.job.shape)

    @property
    def frozen_copy(self) -> str:
        """What the method keeps one of the model for."""
        return "teacher" if self.job.has_teacher else "reference model"

    @property
    def reference_host_bytes(self) -> int:
        """Of the reference model, in a node's CPU memory."""
        on_host = [reference_bytes(self.job, stage)[1] for stage in self.job.stages]
        return self.job.ranks_per_node * max(on_host)

    @property
    def pinned_bytes(self) -> float:
        """CPU memory of a node that its ranks pin for their GPUs: for the copy of a checkpoint,
        from the first one on, and for the reference model.
        """
        if not self.job.hardware.is_cuda:
            return 0
        return self.checkpoint["saved_bytes"] + self.reference_host_bytes

    @property
    def host_bytes_per_node(self) -> float:
        """CPU memory that the ranks of a node share."""
        return self.job.hardware.host_memory_bytes * self.job.ranks_per_node

    @property
    def kv_tokens(self) -> int:
        """Tokens that one engine's cache holds."""
        return int(kv_cache_bytes(self.job) / kv_bytes_per_token(self.job))

    @cached_property
    def problems(self) -> list[str]:
        """Why it does not fit; empty where it does."""
        problems = []
        for phase, fix in _FIXES.items():
            rank = max(self.memory, key=lambda one: one.phases[phase])
            if (over := rank.phases[phase] - rank.limit) > 0:
                problems.append(
                    f"{phase}: stage {rank.stage.index} needs {over / 1e9:.1f} GB more than the "
                    f"{rank.limit / 1e9:.1f} of a device; {fix}"
                )
        longest = max_engine_tokens(self.job.config)
        if self.job.engine.refills and self.kv_tokens < longest:
            problems.append(
                f"rollout: the engine's cache holds {self.kv_tokens} tokens, fewer than one "
                f"sequence of {longest}; raise rollout.gpu_memory_fraction or rollout.tp"
            )
        return problems

    @property
    def is_safe(self) -> bool:
        """Whether it fits with `SAFE_SHARE` to spare: what a search proposes."""
        return not self.problems and self.worst.margin >= SAFE_SHARE * self.worst.limit

    @property
    def tokens_per_second(self) -> float:
        """Sampled ones, over the whole step."""
        return sum(self.job.workload.lengths) / self.step["total"]

    def utilization(self, seconds: float) -> float:
        """MFU: the GEMMs of the training passes over peak, recomputation not counted."""
        job, work = self.job, self.job.workload
        done = 3 * forward_flops(job.shape, work.sequences, sum(work.trained))
        return (
            done / (seconds * job.hardware.peak_flops * job.world_size) if done else 0.0
        )

    @property
    def hours(self) -> float:
        """The whole run's, evaluation and checkpoints left out."""
        return self.step["total"] * self.num_steps / 3600

    @property
    def device_hours(self) -> float:
        """The run's hours, summed over all devices."""
        return self.hours * self.job.world_size

    @property
    def price(self) -> float:
        """Dollars."""
        return self.device_hours * self.job.hardware.price_per_hour

    @cached_property
    def phases(self) -> dict[str, str]:
        """What each phase of a step does, without those that the method has not."""
        job, step, work, method = (
            self.job,
            self.step,
            self.job.workload,
            self.job.config.method,
        )
        trained, sampled = "stored", "nothing is sampled"
        if not method.has_fixed_data:
            trained = "sampled" if method.learns_from_rejected else "accepted"
            sampled = (
                f"{len(work.lengths)} responses of {work.mean_tokens:.0f} tokens on average, "
                f"{busiest_engine(job)[1]} at once in an engine (its cache holds "
                f"{self.kv_tokens:,} tokens); {step['decode_fixed'] / step['decode']:.0%} of "
                "decoding is a fixed cost of each token's step"
            )
        count = num_microbatches(job) * method.num_updates
        phases = {
            "rollout": sampled,
            "verify": f"on {job.hardware.cpu_cores * job.world_size:.0f} CPU cores",
            "old_logprob": "log-probs of the policy that sampled, before several updates",
            "reference": (
                f"{'hidden states' if job.has_teacher else 'log-probs'} of the "
                f"{self.frozen_copy}, in the model's place"
            ),
            "train": (
                f"{len(work.trained)} {trained} responses, updates: {method.num_updates}, "
                f"{count} micro-batches a rank; bubbles {step['bubble']:.0%}, exchange "
                f"{step['exchange']:.2f} s, update {step['update']:.2f} s; MFU "
                f"{self.utilization(step['train']):.1%}"
            ),
            "sync": "updated weights into the engines, with proof",
        }
        optional = ("old_logprob", "reference")
        return {
            name: phases[name]
            for name in STEP_PHASES
            if step[name] or name not in optional
        }

    @property
    def bottleneck(self) -> str:
        """The longest phase, its share of a step, and what it does."""
        name = max(self.phases, key=self.step.__getitem__)
        return f"{name}, {self.step[name] / self.step['total']:.0%} of a step: {self.phases[name]}"

    @property
    def notes(self) -> list[str]:
        """Notes, one line each: what is allowed but wasteful, and what the plan leaves out."""
        job, method, notes = self.job, self.job.config.method, []
        if job.hardware.is_cuda and not job.engine.refills and job.num_responses:
            notes.append(
                "rollout.engine=hf decodes several times slower on a GPU than this plan, which "
                "counts on vLLM's cost of a token; set rollout.engine=vllm"
            )
        if method.most_refills:
            notes.append(
                f"{method.name} draws problems again, up to {method.most_refills} times a step, "
                "where groups teach nothing: the plan counts one draw"
            )
        return notes

    def as_json(self) -> dict[str, Any]:
        """One JSON object: bytes, seconds, shares and dollars."""
        job, work, method = self.job, self.job.workload, self.job.config.method
        stages = [
            {"parameters": rank.stage.num_parameters, **rank.terms, **rank.phases}
            | {"margin": rank.margin}
            for rank in self.memory
        ]
        return {
            "fits": not self.problems,
            **{name: getattr(self, name) for name in _FIGURES},
            "disk": {
                "checkpoints": self.disk.checkpoints,
                "models": self.disk.models,
                "rollouts": self.disk.rollouts,
            },
            "world_size": job.world_size,
            "device": job.hardware.name,
            **job.parallel.model_dump(),
            "etp": job.parallel.expert_tp,
            "dp": job.dp,
            "recompute": job.config.train.recompute,
            "rollout_tp": job.config.rollout.tp,
            "num_engines": job.num_engines,
            "cross_entropy": job.cross_entropy.kind,
            "parameters": job.num_parameters,
            "stages": stages,
            "margin_bytes": self.worst.margin,
            "slots": busiest_engine(job)[1],
            "num_microbatches": num_microbatches(job) * method.num_updates,
            "seconds": self.step,
            "mfu": self.utilization(self.step["train"]),
            "step_mfu": self.utilization(self.step["total"]),
            "steps": self.num_steps,
            "method": method.name,
            "num_updates": method.num_updates,
            "mean_response_tokens": work.mean_tokens,
            "num_accepted": len(work.trained),
        }
