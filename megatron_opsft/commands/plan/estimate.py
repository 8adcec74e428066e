"""The plan of a whole run: if it fits, how long a step takes, what it costs; pure."""

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from megatron_opsft.commands.plan.job import PlannedRun
from megatron_opsft.commands.plan.memory import (
    RankMemory,
    checkpoint_bytes,
    kept_state_bytes,
    kv_bytes_per_token,
    kv_cache_bytes,
    offload_bytes,
    rank_memory,
    reference_bytes,
)
from megatron_opsft.commands.plan.seconds import (
    busiest_engine,
    estimate_step,
    num_microbatches,
)
from megatron_opsft.config.training import OFFLOAD_LEVELS, OffloadLevel
from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.shape import forward_flops, weight_flops
from megatron_opsft.records import JsonObject
from megatron_opsft.run.start.checked_run import check_offload, max_engine_tokens
from megatron_opsft.run.start.disk import (
    DiskUse,
    checkpoint_bytes_each,
    disk_use,
)

# Share of a device's memory that should stay free: the formulas are no more accurate than that.
SAFE_SHARE = 0.05
_FIXES = {
    "rollout": "lower rollout.gpu_memory_fraction or raise parallel.tp or pp",
    "train": "raise parallel.tp or train.recompute, or lower train.max_tokens_per_microbatch",
    "sync": "raise rollout.tp or lower sync.bucket_mb",
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that is predicted of a run."""

    run: PlannedRun
    """It has passed `check_planned_run`."""
    num_steps: int
    overrides: tuple[str, ...] = ()
    """The key=value words with which a search made the run from the user's configuration."""

    @cached_property
    def step(self) -> dict[str, float]:
        """Seconds of each phase, from `estimate_step`."""
        return estimate_step(self.run)

    @cached_property
    def memory(self) -> list[RankMemory]:
        """Memory of a rank of each pipeline stage."""
        count = max(1, num_microbatches(self.run))
        return [rank_memory(self.run, stage, count) for stage in self.run.stages]

    @cached_property
    def worst(self) -> RankMemory:
        """The rank with the least free memory."""
        return min(self.memory, key=lambda rank: rank.margin)

    @cached_property
    def checkpoint(self) -> dict[str, float]:
        """Bytes of a checkpoint, from `checkpoint_bytes`."""
        return checkpoint_bytes(self.run)

    @cached_property
    def disk(self) -> DiskUse:
        """Bytes that the run writes."""
        return disk_use(self.run.config, self.run.shape)

    @property
    def frozen_copy(self) -> str:
        """The name for the method's frozen copy of the model."""
        return "teacher" if self.run.has_teacher else "reference model"

    @property
    def reference_host_bytes(self) -> int:
        """Bytes of the reference model in one node's CPU memory."""
        return self.run.ranks_per_node * max(
            reference_bytes(self.run, stage).host for stage in self.run.stages
        )

    @property
    def offload_host_bytes(self) -> int:
        """Bytes of what trainers give up (`train.offload`) in one node's CPU memory."""
        return self.run.ranks_per_node * max(
            offload_bytes(self.run, stage) for stage in self.run.stages
        )

    @property
    def pinned_copy_bytes(self) -> float:
        """Bytes of a checkpoint that a node's ranks copy from their GPUs; the rest is in the CPU's
        memory already, because the trainers sleep when it is saved.
        """
        saved = self.checkpoint["saved_bytes"]
        if self.run.gives_up("all"):
            return 0
        if self.run.gives_up("optimizer"):  # what is left are the weights
            saved *= self.run.dtype_bytes / checkpoint_bytes_each(self.run.config)
        return saved

    @property
    def pinned_bytes(self) -> float:
        """CPU memory of a node that its ranks pin for their GPUs.

        It holds the reference model, what the trainers give up and, from the first checkpoint on,
        the copy of a checkpoint.
        """
        if not self.run.hardware.is_cuda:
            return 0
        kept = self.reference_host_bytes + self.offload_host_bytes
        return self.pinned_copy_bytes + kept

    @property
    def host_bytes_per_node(self) -> float:
        """CPU memory that the ranks of a node share."""
        return self.run.hardware.host_memory_bytes * self.run.ranks_per_node

    @property
    def kv_tokens(self) -> int:
        """Tokens of one sequence that fit in one engine's cache."""
        left = kv_cache_bytes(self.run) - kept_state_bytes(self.run)
        return max(0, int(left / kv_bytes_per_token(self.run)))

    @cached_property
    def problems(self) -> list[str]:
        """Reasons why the run does not fit; empty if it fits."""
        problems = []
        for phase, fix in _FIXES.items():
            rank = max(self.memory, key=lambda rank: rank.phases[phase])
            excess = rank.phases[phase] - rank.limit
            if excess > 0:
                problems.append(
                    f"{phase}: stage {rank.stage.index} needs {excess / 1e9:.1f} GB more than the "
                    f"{rank.limit / 1e9:.1f} of a device; {fix}"
                )
        longest = max_engine_tokens(self.run.config)
        if self.run.engine.refills and self.kv_tokens < longest:
            problems.append(
                f"rollout: the engine's cache holds {self.kv_tokens} tokens, fewer than one "
                f"sequence of {longest}; raise rollout.gpu_memory_fraction or rollout.tp"
            )
        kept = self.reference_host_bytes + self.offload_host_bytes
        needed = self.checkpoint["saved_bytes"] + kept
        if self.offload_host_bytes and needed > self.host_bytes_per_node:
            problems.append(
                f"train.offload={self.run.train.offload}: with the copy of a checkpoint a node "
                f"needs {needed / 1e9:.0f} GB of host memory, and has "
                f"{self.host_bytes_per_node / 1e9:.0f}; take more nodes"
            )
        return problems

    @cached_property
    def fitting_offload(self) -> OffloadLevel | None:
        """The least `train.offload` with which the run fits; None if it fits as it is, or never.

        It is proposed for GPUs alone: on a CPU the copies are in the same memory.
        """
        if not self.problems or not self.run.hardware.is_cuda:
            return None
        for level in self.possible_offloads:
            changed = self.run.with_offload(level)
            if not Plan(run=changed, num_steps=self.num_steps).problems:
                return level
        return None

    @property
    def possible_offloads(self) -> list[OffloadLevel]:
        """The values of `train.offload` that the run may have."""
        possible = []
        for level in OFFLOAD_LEVELS:
            with suppress(UserError):
                check_offload(self.run.with_offload(level).config)
                possible.append(level)
        return possible

    @property
    def is_safe(self) -> bool:
        """True if the run fits with `SAFE_SHARE` to spare; a search proposes only such layouts."""
        return not self.problems and self.worst.margin >= SAFE_SHARE * self.worst.limit

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens of a step over the seconds of the whole step."""
        return sum(self.run.workload.lengths) / self.step["total"]

    def utilization(self, seconds: float) -> float:
        """Return the MFU over `seconds`, of the training passes or of the whole step: operations of
        the training's matrix products over peak. Recomputation does not count.
        """
        run, workload = self.run, self.run.workload
        sequences, num_trained = workload.sequences, sum(workload.trained)
        # Backward costs twice as many.
        flops = 3 * forward_flops(run.shape, sequences, num_trained)
        if run.config.lora.rank:  # no gradients of weights
            flops -= weight_flops(run.shape, sum(sequences), num_trained)
        if not flops:
            return 0.0
        return flops / (seconds * run.hardware.peak_flops * run.world_size)

    @property
    def hours(self) -> float:
        """Hours of the whole run, without evaluation and checkpoints."""
        return self.step["total"] * self.num_steps / 3600

    @property
    def device_hours(self) -> float:
        """The run's hours, summed over all devices."""
        return self.hours * self.run.world_size

    @property
    def price(self) -> float:
        """Dollars of the whole run."""
        return self.device_hours * self.run.hardware.price_per_hour

    @property
    def microbatches_per_step(self) -> int:
        """Micro-batches of each data-parallel rank in a step, over all updates."""
        return num_microbatches(self.run) * self.run.method.num_updates

    @cached_property
    def phases(self) -> dict[str, str]:
        """One description for each phase that the method has."""
        cores = self.run.hardware.cpu_cores * self.run.world_size
        scores = "hidden states" if self.run.has_teacher else "log-probs"
        phases = {
            "rollout": self._describe_rollout(),
            "verify": f"on {cores:.0f} CPU cores",
            "old_logprob": "log-probs of the policy that sampled, before several updates",
            "reference": f"{scores} of the {self.frozen_copy}, in the model's place",
            "train": self._describe_training(),
            "sync": "updated weights into the engines, with proof",
            "offload": f"copies of train.offload={self.run.train.offload} that nothing hides",
        }
        for name in ("old_logprob", "reference", "offload"):
            if not self.step[name]:
                del phases[name]
        return phases

    def _describe_rollout(self) -> str:
        if self.run.method.has_fixed_data:
            return "nothing is sampled"
        workload, step = self.run.workload, self.step
        return (
            f"{len(workload.lengths)} responses of {workload.mean_tokens:.0f} tokens on average, "
            f"{busiest_engine(self.run).batch_size} at once in an engine (its cache holds "
            f"{self.kv_tokens:,} tokens); {step['decode_fixed'] / step['decode']:.0%} of "
            "decoding is a fixed cost of each token's step"
        )

    def _describe_training(self) -> str:
        method, step = self.run.method, self.step
        trained = "accepted"
        if method.has_fixed_data:
            trained = "stored"
        elif method.learns_from_rejected:
            trained = "sampled"
        return (
            f"{len(self.run.workload.trained)} {trained} responses, updates: "
            f"{method.num_updates}, {self.microbatches_per_step} micro-batches a rank; bubbles "
            f"{step['bubble']:.0%}, exchange {step['exchange']:.2f} s, update "
            f"{step['update']:.2f} s; MFU {self.utilization(step['train']):.1%}"
        )

    @property
    def bottleneck(self) -> str:
        """The longest phase, its share of a step, and what it does."""
        name = max(self.phases, key=self.step.__getitem__)
        share = self.step[name] / self.step["total"]
        return f"{name}, {share:.0%} of a step: {self.phases[name]}"

    @property
    def notes(self) -> list[str]:
        """One line for each setting that is wasteful or that the plan leaves out."""
        run, method = self.run, self.run.method
        notes = []
        if run.hardware.is_cuda and not run.engine.refills:
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

    def as_json(self) -> JsonObject:
        """Return one JSON object: bytes, seconds, shares and dollars."""
        run, workload, method = self.run, self.run.workload, self.run.method
        return {
            "fits": not self.problems,
            "is_safe": self.is_safe,
            "problems": self.problems,
            "notes": self.notes,
            "bottleneck": self.bottleneck,
            "checkpoint": self.checkpoint,
            "host_bytes_per_node": self.host_bytes_per_node,
            "reference_host_bytes": self.reference_host_bytes,
            "pinned_bytes": self.pinned_bytes,
            "offload": run.train.offload,
            "offload_host_bytes": self.offload_host_bytes,
            "fitting_offload": self.fitting_offload,
            "kv_tokens": self.kv_tokens,
            "tokens_per_second": self.tokens_per_second,
            "device_hours": self.device_hours,
            "price": self.price,
            "disk": {
                "checkpoints": self.disk.checkpoints,
                "models": self.disk.models,
                "rollouts": self.disk.rollouts,
                "held_out": self.disk.held_out,
            },
            "world_size": run.world_size,
            "device": run.hardware.name,
            **run.parallel.model_dump(),
            "etp": run.parallel.expert_tp,
            "dp": run.dp,
            "recompute": run.train.recompute,
            "rollout_tp": run.rollout.tp,
            "num_engines": run.num_engines,
            "cross_entropy": run.cross_entropy.kind,
            "parameters": run.num_parameters,
            "trained_parameters": run.num_trained,
            "stages": [
                {
                    "parameters": rank.stage.num_parameters,
                    **rank.terms,
                    **rank.phases,
                    "margin": rank.margin,
                }
                for rank in self.memory
            ],
            "margin_bytes": self.worst.margin,
            "slots": busiest_engine(run).batch_size,
            "num_microbatches": self.microbatches_per_step,
            "seconds": self.step,
            "mfu": self.utilization(self.step["train"]),
            "step_mfu": self.utilization(self.step["total"]),
            "steps": self.num_steps,
            "method": method.name,
            "num_updates": method.num_updates,
            "mean_response_tokens": workload.mean_tokens,
            "num_accepted": len(workload.trained),
        }
