"""Bytes on one rank in the three phases of a step, by formula; pure, no Megatron.

Resident all the time: weights, float32 main gradients, and this rank's part of the optimizer (in
bfloat16 float32 main weights and two moments, in float32 the moments), and a frozen copy of the
weights where the method has a reference model that stays on the device. A rollout adds the engine,
a training pass its activations and the loss, a weight sync the engine's weights and two buckets.
"""

from dataclasses import dataclass
from functools import cache
from math import prod

from megatron_opsft.commands.plan.activations import activation_bytes
from megatron_opsft.commands.plan.job import Job, Stage
from megatron_opsft.models.architectures.shape import ModelShape
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.models.weights.vllm_layout import vllm_parameters
from megatron_opsft.rollout.limits import max_engine_tokens
from megatron_opsft.run.start.disk import STATE_BYTES, checkpoint_bytes_each

# Of an engine beside weights and keys and values: CUDA graphs and its own buffers, which stay while
# it sleeps unless `rollout.deep_sleep` takes them off the GPU. Assumption.
GRAPH_BYTES = 1.5e9
# The Hugging Face engine's buffers grow by a quarter (`rollout.hf.attention`).
_HF_CACHE_SLACK = 1.25

_ALL = ("rollout", "train", "sync")

Terms = dict[str, tuple[float, tuple[str, ...]]]
"""Name -> (bytes, the phases in which they are there)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes on one rank of a stage. terms: name -> bytes; phases: what it needs in each."""

    stage: Stage
    terms: dict[str, float]
    phases: dict[str, float]
    limit: float

    @property
    def margin(self) -> float:
        """Negative where it does not fit."""
        return self.limit - max(self.phases.values())


def rank_memory(job: Job, stage: Stage, num_microbatches: int) -> RankMemory:
    """A rank of a stage; num_microbatches: of an update on each data-parallel rank."""
    kept, moment, loss = activation_bytes(job, stage, num_microbatches)
    if loss and job.has_teacher and reference_bytes(job, stage)[1]:
        loss += (
            job.rows_per_rank * job.shape.hidden_size * job.dtype_bytes
        )  # of its output layer
    # The two exist one after the other: the larger one counts.
    of_backward, of_loss = ((), ("train",)) if loss > moment else (("train",), ())
    terms: Terms = {
        "weights": (stage.weight_bytes, _ALL),
        "gradients": (stage.gradient_bytes, _ALL),
        "optimizer": (stage.optimizer_bytes, _ALL),
        "reference_model": (reference_bytes(job, stage)[0], _ALL),
        "activations": (kept, ("train",)),
        "backward_pass": (moment, of_backward),
        "loss": (loss, of_loss),
        "sync_buckets": (_bucket_bytes(job), ("sync",)),
        **_engine_terms(job),
        "reserved": (job.hardware.reserved_bytes, _ALL),
    }
    return RankMemory(
        stage=stage,
        terms={name: num_bytes for name, (num_bytes, _) in terms.items()},
        phases={phase: _sum_of(terms, phase) for phase in _ALL},
        limit=job.hardware.memory_bytes,
    )


def _sum_of(terms: Terms, phase: str) -> float:
    return sum(num_bytes for num_bytes, phases in terms.values() if phase in phases)


def reference_bytes(job: Job, stage: Stage) -> tuple[int, int]:
    """(on the device, in the host's memory) of a rank's reference model, if there is one.

    As `model.reference` decides when trainer and engine are there: on a GPU it stays only where it
    takes no more than a tenth of what is free.
    """
    if not job.config.method.objective(1.0).keeps_frozen_model:
        return 0, 0
    held = stage.weight_bytes + stage.gradient_bytes + stage.optimizer_bytes
    taken = job.hardware.reserved_bytes + held + _sum_of(_engine_terms(job), "rollout")
    if (
        job.hardware.is_cuda
        and 10 * stage.weight_bytes > job.hardware.memory_bytes - taken
    ):
        return 0, stage.weight_bytes
    return stage.weight_bytes, 0


def _engine_terms(job: Job) -> Terms:
    """Of one rank of a rollout engine; vLLM on a GPU alone can sleep."""
    weights, cache = engine_elements(job) * job.dtype_bytes, kv_cache_bytes(job)
    if not job.engine.refills:
        return {
            "engine_weights": (weights, _ALL),
            "kv_cache": (cache, ("rollout", "sync")),
        }
    if not job.hardware.is_cuda:
        return {"engine_weights": (weights, _ALL), "kv_cache": (cache, _ALL)}
    awake = ("rollout", "sync")
    return {
        "engine_weights": (weights, awake),
        "engine_graphs": (
            GRAPH_BYTES,
            awake if job.config.rollout.deep_sleep else _ALL,
        ),
        "engine_prefill": (_profiled_bytes(job), ("rollout",)),
        "kv_cache": (cache, ("rollout",)),
    }


def checkpoint_bytes(job: Job) -> dict[str, float]:
    """As `model.checkpoint_share`: every rank writes and reads what it updates.

    total_bytes: on disk. saved_bytes: that the ranks of a node write, from as much host memory,
    which is pinned for a GPU; `runtime.pinned` adds less than 64 bytes a tensor. resume_bytes: that
    they read, once to check the files and once without the weights that follow from main weights.
    bandwidth: of a node's storage, bytes a second.
    """
    each = checkpoint_bytes_each(job.config)
    parallel = job.parallel
    updated = job.ranks_per_node * max(stage.updated_parameters for stage in job.stages)
    experts = sum(stage.expert_parameters for stage in job.stages)
    dense = sum(stage.num_parameters for stage in job.stages) - experts
    elements = parallel.tp * dense + parallel.expert_tp * parallel.ep * experts
    total = elements * each
    # Files are checked by all ranks in turn, whoever reads them afterwards.
    checked = total * job.ranks_per_node // job.world_size
    return {
        "total_bytes": total,
        "saved_bytes": updated * each,
        "resume_bytes": checked + updated * STATE_BYTES,
        "bandwidth": job.hardware.storage_bandwidth * job.ranks_per_node,
    }


def engine_elements(job: Job) -> int:
    """Elements of the weights on one rank (the first) of an engine."""
    if not job.engine.tensor_parallel:
        return job.num_parameters
    return _sharded_elements(job.shape, job.config.rollout.tp)


@cache
def _sharded_elements(shape: ModelShape, tp: int) -> int:
    """As vLLM shards them, vocabulary padding included."""
    return sum(prod(p.shape) for p in vllm_parameters(WeightTable(shape), 0, tp))


def kv_bytes_per_token(job: Job) -> float:
    """On one rank of an engine."""
    heads = max(1.0, job.shape.num_kv_heads / job.config.rollout.tp)
    return 2 * job.shape.num_layers * heads * job.shape.head_dim * job.dtype_bytes


def kv_cache_bytes(job: Job) -> float:
    """What one rank of an engine has for keys and values, at least nothing; as
    `rollout.vllm.options` and `rollout.hf.engine` say.
    """
    rollout, token = job.config.rollout, kv_bytes_per_token(job)
    longest = max_engine_tokens(job.config)
    if not job.engine.refills:
        rows = min(rollout.batch_size, -(-job.num_responses // job.num_engines))
        return _HF_CACHE_SLACK * rows * longest * token
    if rollout.kv_cache_bytes:
        return float(rollout.kv_cache_bytes)
    if not job.hardware.is_cuda:  # a full batch of the longest sequences
        return min(
            longest * (rollout.batch_size + 1) * token, job.hardware.memory_bytes / 4
        )
    taken = engine_elements(job) * job.dtype_bytes + GRAPH_BYTES + _profiled_bytes(job)
    return max(0.0, rollout.gpu_memory_fraction * job.hardware.memory_bytes - taken)


def _profiled_bytes(job: Job) -> float:
    """The most that vLLM's profiling pass allocates, which it sets aside: one layer's feed-forward
    part on the largest batch of prompt tokens, or the sampler's float32 copies of the logits.
    """
    shape, rollout = job.shape, job.config.rollout
    width = (
        3 * shape.ffn_size
        if shape.moe is None
        else 3 * shape.moe.top_k * shape.moe.ffn_size
    )
    tokens = min(
        job.hardware.engine_batch_tokens,
        rollout.batch_size * max_engine_tokens(job.config),
    )
    layer = tokens * (width / rollout.tp + 4 * shape.hidden_size) * job.dtype_bytes
    sampler = 3 * 4 * rollout.batch_size * shape.vocab_size
    return max(layer, sampler)


def _bucket_bytes(job: Job) -> float:
    """A weight sync: two buckets under way, or one and a whole tensor (an embedding)."""
    bucket = min(
        job.config.sync.bucket_mb * 2**20, job.num_parameters * job.dtype_bytes
    )
    largest = job.shape.vocab_size * job.shape.hidden_size * job.dtype_bytes
    if job.parallel.tp == job.parallel.pp == job.parallel.ep == 1:
        return 2.0 * bucket
    return max(2.0 * bucket, float(bucket + largest))
