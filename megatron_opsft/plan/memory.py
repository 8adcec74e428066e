"""Bytes on one rank in the three phases of a step, by formula; pure, no Megatron.

Resident all the time: weights, float32 main gradients, and this rank's part of the optimizer (in
bfloat16 float32 main weights and two moments, in float32 the moments), and a frozen copy of the
weights where the method has a reference model that stays on the device. A rollout adds the engine,
a training pass its activations and the loss, a weight sync the engine's weights and two buckets.
"""

from dataclasses import dataclass
from functools import cache
from math import prod

from megatron_opsft.architectures.shape import ModelShape
from megatron_opsft.loss.loss_memory import fused_linear_bytes, whole_logits_bytes
from megatron_opsft.plan.activations import (
    final_norm_bytes,
    kept_bytes,
    layer_bytes,
    recomputed_bytes,
)
from megatron_opsft.plan.job import TrainingJob
from megatron_opsft.plan.stages import Stage
from megatron_opsft.weights.rules import WeightTable
from megatron_opsft.weights.vllm_layout import vllm_parameters

# Of an engine beside weights and keys and values: CUDA graphs and its own buffers. Assumption.
_ENGINE_EXTRA_BYTES = 1.5e9
# What of it stays while it sleeps (graphs and communicators are not given back). Assumption.
_ASLEEP_BYTES = 1.5e9
# The Hugging Face engine's buffers grow by a quarter (`rollout.hf.kv_cache`).
_HF_CACHE_SLACK = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Bytes of one rank of a rollout engine. extra: graphs and profiled activations; kv_cache: what
    is left for keys and values; asleep: what of it all stays while the trainer works, syncing:
    while weights come.
    """

    weights: float
    extra: float
    kv_cache: float
    asleep: float
    syncing: float

    @property
    def awake(self) -> float:
        return self.weights + self.extra + max(0.0, self.kv_cache)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes on one rank of a stage. loss and recompute exist one after the other. reference: of a
    reference model on the device.
    """

    stage: Stage
    engine: EngineMemory
    reserved: float
    reference: float
    activations: float
    recompute: float
    loss: float
    sync_buckets: float
    limit: float

    @property
    def phases(self) -> dict[str, float]:
        """What it needs in each."""
        base = self.reserved + self.stage.resident_bytes + self.reference
        passes = self.activations + max(self.recompute, self.loss)
        return {
            "rollout": base + self.engine.awake,
            "train": base + passes + self.engine.asleep,
            "sync": base + self.sync_buckets + self.engine.syncing,
        }

    @property
    def margin(self) -> float:
        """Negative where it does not fit."""
        return self.limit - max(self.phases.values())


def num_in_flight(job: TrainingJob, stage: int, num_microbatches: int) -> float:
    """Micro-batches whose activations a rank holds at once, each of all its layers.

    1F1B: a stage runs ahead by the stages behind it. Interleaved, by two micro-batches for each of
    those and by one round of all its chunks but the last (Narayanan et al., 2021).
    """
    pp, vpp = job.parallel.pp, job.parallel.vpp
    if vpp is None:
        return min(pp - stage, num_microbatches)
    chunks = min(2 * (pp - stage - 1) + (vpp - 1) * pp + 1, num_microbatches * vpp)
    return chunks / vpp


def activation_bytes(
    job: TrainingJob, stage: Stage, in_flight: float
) -> tuple[float, float, float]:
    """(kept, needed for a moment in a backward pass, needed for a moment by the loss), of the
    largest micro-batch. The loss exists on the last stage alone, never together with the
    second.
    """
    tokens = job.microbatch_tokens
    layer = layer_bytes(job)
    layers = stage.num_layers - job.config.train.offload_layers
    kept = in_flight * tokens * layers * kept_bytes(job, layer)
    if job.config.train.offload_layers:
        kept += 2 * tokens * layer.kept  # one on its way to the CPU and one back
    moment = tokens * recomputed_bytes(job, layer)
    if not stage.has_output:
        kept += in_flight * tokens * layer.input  # the schedule keeps what it has sent on
        moment += tokens * layer.input
    if job.sequence_parallel:
        # Megatron gathers a layer's input into one buffer, which it keeps.
        kept += tokens * job.shape.hidden_size * job.dtype_bytes
    moment += _largest_weight_gradient(job)
    loss = 0.0
    if stage.has_output:
        while_loss, in_norm = final_norm_bytes(job)
        loss = max(tokens * while_loss + _loss_bytes(job), tokens * in_norm)
    return kept, moment, loss


def _largest_weight_gradient(job: TrainingJob) -> float:
    """In the model's dtype, until it is added to the main gradient."""
    shape = job.shape
    rows = 2 * shape.shard_ffn[1] / job.parallel.expert_tp
    return rows * shape.hidden_size * job.dtype_bytes


def _loss_bytes(job: TrainingJob) -> float:
    """At most: every token of the micro-batch is one of a response."""
    if job.cross_entropy.method == "fused_linear":
        return fused_linear_bytes(
            job.microbatch_tokens,
            job.microbatch_tokens,
            job.shape.hidden_size,
            min(job.rows_per_rank, job.shape.vocab_size),  # it never touches padding
            dtype_bytes=job.dtype_bytes,
            on_cuda=job.hardware.is_cuda,
            sequence_parallel=job.sequence_parallel,
        )
    return whole_logits_bytes(
        job.microbatch_tokens,
        job.shape.hidden_size,
        job.rows_per_rank,
        dtype_bytes=job.dtype_bytes,
    )


def engine_elements(job: TrainingJob) -> int:
    """Elements of the weights on one rank (the first) of an engine."""
    if not job.engine.tensor_parallel:
        return whole_elements(job.shape)
    return _sharded_elements(job.shape, job.engine_tp)


@cache
def _sharded_elements(shape: ModelShape, tp: int) -> int:
    """As vLLM shards them, vocabulary padding included."""
    return sum(prod(p.shape) for p in vllm_parameters(WeightTable(shape), 0, tp))


@cache
def whole_elements(shape: ModelShape) -> int:
    """Parameters of the Hugging Face model."""
    return sum(prod(s) for s in WeightTable(shape).hf_shapes().values())


def kv_bytes_per_token(job: TrainingJob) -> float:
    """On one rank of an engine."""
    heads = max(1.0, job.shape.num_kv_heads / job.engine_tp)
    return 2 * job.shape.num_layers * heads * job.shape.head_dim * job.dtype_bytes


def rank_memory(job: TrainingJob, stage: Stage, num_microbatches: int) -> RankMemory:
    """A rank of a stage; num_microbatches: of an update on each data-parallel rank."""
    in_flight = num_in_flight(job, stage.index, num_microbatches)
    kept, moment, loss = activation_bytes(job, stage, in_flight)
    there = job.keeps_reference and reference_is_on_device(job, stage)
    return RankMemory(
        stage=stage,
        engine=engine_memory(job),
        reserved=job.hardware.reserved_bytes,
        reference=stage.weight_bytes if there else 0,
        activations=kept,
        recompute=moment,
        loss=loss,
        sync_buckets=_bucket_bytes(job),
        limit=job.hardware.memory_bytes,
    )


def reference_is_on_device(job: TrainingJob, stage: Stage) -> bool:
    """As `model.reference` decides when trainer and engine are there: on a GPU only where it takes
    no more than a tenth of what is free.
    """
    if not job.hardware.is_cuda:
        return True
    taken = job.hardware.reserved_bytes + stage.resident_bytes + engine_memory(job).awake
    return 10 * stage.weight_bytes <= job.hardware.memory_bytes - taken


def engine_memory(job: TrainingJob) -> EngineMemory:
    """As `rollout.vllm.options` and `rollout.hf.engine` say; vLLM on a GPU alone can sleep."""
    rollout, hardware = job.config.rollout, job.hardware
    weights = float(engine_elements(job) * job.dtype_bytes)
    if job.engine.refills and hardware.is_cuda:
        extra = _ENGINE_EXTRA_BYTES + _profiled_bytes(job)
        budget = rollout.gpu_memory_fraction * hardware.memory_bytes
        cache = float(rollout.kv_cache_bytes or budget - weights - extra)
        return EngineMemory(
            weights=weights, extra=extra, kv_cache=cache, asleep=_ASLEEP_BYTES, syncing=weights
        )
    if job.engine.refills:
        cache = float(rollout.kv_cache_bytes or _cpu_cache_bytes(job))
        asleep = weights + cache
    else:
        rows = min(rollout.batch_size, -(-job.num_responses // job.num_engines))
        cache = _HF_CACHE_SLACK * rows * job.max_sequence_tokens * kv_bytes_per_token(job)
        asleep = weights
    return EngineMemory(
        weights=weights, extra=0.0, kv_cache=cache, asleep=asleep, syncing=weights + cache
    )


def _profiled_bytes(job: TrainingJob) -> float:
    """The most that vLLM's profiling pass allocates, which it sets aside: one layer's feed-forward
    part on the largest batch of prompt tokens (longer prompts come in parts), or the sampler's two
    float32 copies of the logits.
    """
    shape = job.shape
    width = 3 * shape.ffn_size if shape.moe is None else 3 * shape.moe.top_k * shape.moe.ffn_size
    batch_size = job.config.rollout.batch_size
    tokens = min(job.hardware.engine_batch_tokens, batch_size * job.max_sequence_tokens)
    layer = tokens * (width / job.engine_tp + 4 * shape.hidden_size) * job.dtype_bytes
    sampler = 3 * 4 * batch_size * shape.vocab_size
    return max(layer, sampler)


def _cpu_cache_bytes(job: TrainingJob) -> float:
    """As `rollout.vllm.options` sizes it: a full batch of the longest sequences."""
    tokens = job.max_sequence_tokens * (job.config.rollout.batch_size + 1)
    return min(tokens * kv_bytes_per_token(job), job.hardware.memory_bytes / 4)


def _bucket_bytes(job: TrainingJob) -> float:
    """A weight sync: two buckets under way. The first one streams whole tensors instead, of which
    one may be larger than a bucket (an embedding), beside its gathered shards.
    """
    bucket = min(job.config.sync.bucket_mb * 2**20, whole_elements(job.shape) * job.dtype_bytes)
    largest = job.shape.vocab_size * job.shape.hidden_size * job.dtype_bytes
    if job.parallel.tp == job.parallel.pp == job.parallel.ep == 1:
        return 2.0 * bucket
    return max(2.0 * bucket, float(bucket + largest))
