"""Bytes on one rank in the three phases of a step, by formula; pure, no Megatron.

A rank holds its weights, and of those that are trained (with LoRA the adapters) float32 main
gradients and its share of the optimizer: two float32 moments, and in bfloat16 float32 main weights;
always, or as far as `train.offload` says not while the engine samples. If the method has a
reference model that stays on the device, a frozen copy of the trained weights is added. A rollout
adds the engine, a training pass its activations and the loss, a weight sync the engine's weights
and two buckets.
"""

from functools import cache
from math import prod
from typing import NamedTuple

from megatron_opsft.commands.plan.activations import activation_bytes
from megatron_opsft.commands.plan.job import PlannedRun, Stage
from megatron_opsft.models.architectures.shape import (
    CHUNK_LENGTH,
    ModelShape,
    state_bytes,
)
from megatron_opsft.models.weights.lora import MERGE_BYTES
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.models.weights.vllm_layout import vllm_parameters
from megatron_opsft.records import record
from megatron_opsft.run.start.checked_run import max_engine_tokens
from megatron_opsft.run.start.disk import (
    STATE_BYTES,
    checkpoint_bytes_each,
)
from megatron_opsft.runtime.rounding import ceil_div

# CUDA graphs of an engine and its own buffers. A sleeping engine keeps them on the GPU unless
# `rollout.deep_sleep` is set. Assumption.
GRAPH_BYTES = 1.5e9
# The Hugging Face engine's buffers grow by a quarter (`rollout.hf.attention`).
_HF_CACHE_SLACK = 1.25

_ALL = ("rollout", "train", "sync")
_ENGINE_AWAKE = ("rollout", "sync")
_TRAINER_AWAKE = ("train", "sync")


class _Term(NamedTuple):
    """One use of a rank's memory."""

    num_bytes: float
    phases: tuple[str, ...] = _ALL
    """Phases of a step in which it exists."""


@record
class RankMemory:
    """Bytes on one rank of a stage."""

    stage: Stage
    terms: dict[str, float]
    """Use of memory -> bytes."""
    phases: dict[str, float]
    """Phase of a step -> bytes needed in it."""
    limit: float
    """Bytes of the device's memory."""

    @property
    def margin(self) -> float:
        """Free bytes in the largest phase; negative if it does not fit."""
        return self.limit - max(self.phases.values())


class ReferenceBytes(NamedTuple):
    """Bytes of a rank's reference model; one of them is 0, and both without such a model."""

    device: int
    host: int


def rank_memory(run: PlannedRun, stage: Stage, num_microbatches: int) -> RankMemory:
    """Sum up the memory of a rank of `stage`.

    num_microbatches: how many an update has on each data-parallel rank.
    """
    stored, backward, loss = activation_bytes(run, stage, num_microbatches)
    reference = reference_bytes(run, stage)
    if loss and run.has_teacher and reference.host:
        # The teacher's output layer is on the device then.
        loss += run.rows_per_rank * run.shape.hidden_size * run.dtype_bytes
    terms = {
        **_trainer_terms(run, stage),
        "reference_model": _Term(reference.device),
        "activations": _Term(stored, ("train",)),
        "backward_pass": _Term(backward, ("train",)),
        "loss": _Term(loss, ("train",)),
        "sync_buckets": _Term(_bucket_bytes(run) + _merge_bytes(run), ("sync",)),
        **_engine_terms(run),
        "reserved": _Term(run.hardware.reserved_bytes),
    }
    # The backward pass and the loss exist one after the other, so only the larger one counts.
    smaller = "backward_pass" if loss > backward else "loss"
    terms[smaller] = terms[smaller]._replace(phases=())
    return RankMemory(
        stage=stage,
        terms={name: term.num_bytes for name, term in terms.items()},
        phases={phase: _sum_of(terms, phase) for phase in _ALL},
        limit=run.hardware.memory_bytes,
    )


def _sum_of(terms: dict[str, _Term], phase: str) -> float:
    return sum(term.num_bytes for term in terms.values() if phase in term.phases)


def _trainer_terms(run: PlannedRun, stage: Stage) -> dict[str, _Term]:
    """Memory of the trainer, as `model.offload` gives it up: gradients before a weight sync, the
    others in its course. On a CPU copies take as much as what they are copied from.
    """
    gradients = _Term(stage.gradient_bytes)
    optimizer, weights = _Term(stage.optimizer_bytes), _Term(stage.weight_bytes)
    if run.gives_up("gradients"):
        gradients = gradients._replace(phases=("train",))
    terms = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
    copied = offload_bytes(run, stage)
    if not run.hardware.is_cuda:
        return terms | ({"offload_copies": _Term(copied, ("sync",))} if copied else {})
    if run.gives_up("optimizer"):
        terms["optimizer"] = optimizer._replace(phases=_TRAINER_AWAKE)
    if run.gives_up("all"):
        terms["weights"] = weights._replace(phases=_TRAINER_AWAKE)
    return terms


def offload_bytes(run: PlannedRun, stage: Stage) -> int:
    """Bytes of a rank that wait in host memory while the engine samples."""
    num_bytes = stage.optimizer_bytes if run.gives_up("optimizer") else 0
    return num_bytes + (stage.weight_bytes if run.gives_up("all") else 0)


def reference_bytes(run: PlannedRun, stage: Stage) -> ReferenceBytes:
    """Decide where a rank keeps its reference model, as `model.reference` does in a run.

    On a GPU it stays on the device only if it takes at most a tenth of the memory that trainer and
    engine leave free, and the trainer never sleeps.
    """
    if not run.method.objective(1.0).keeps_frozen_model:
        return ReferenceBytes(device=0, host=0)
    hardware = run.hardware
    trainer = stage.weight_bytes + stage.gradient_bytes + stage.optimizer_bytes
    engine = _sum_of(_engine_terms(run), "rollout")
    free = hardware.memory_bytes - (hardware.reserved_bytes + trainer + engine)
    has_room = 10 * stage.trained_bytes <= free and not run.gives_up("gradients")
    if hardware.is_cuda and not has_room:
        return ReferenceBytes(device=0, host=stage.trained_bytes)
    return ReferenceBytes(device=stage.trained_bytes, host=0)


def _engine_terms(run: PlannedRun) -> dict[str, _Term]:
    """Memory of one rank of a rollout engine; only vLLM on a GPU can sleep."""
    weights = engine_elements(run) * run.dtype_bytes
    kv_cache = kv_cache_bytes(run)
    if not run.hardware.is_cuda or not run.engine.refills:
        cache_phases = _ALL if run.engine.refills else _ENGINE_AWAKE
        return {
            "engine_weights": _Term(weights),
            "kv_cache": _Term(kv_cache, cache_phases),
        }
    graph_phases = _ENGINE_AWAKE if run.rollout.deep_sleep else _ALL
    return {
        "engine_weights": _Term(weights, _ENGINE_AWAKE),
        "engine_graphs": _Term(GRAPH_BYTES, graph_phases),
        "engine_prefill": _Term(_profiled_bytes(run), ("rollout",)),
        "kv_cache": _Term(kv_cache, ("rollout",)),
    }


def checkpoint_bytes(run: PlannedRun) -> dict[str, float]:
    """Compute what a checkpoint takes; every rank writes and reads what it updates.

    total_bytes: on disk. saved_bytes: written by the ranks of a node, from as much host memory,
    which is pinned for a GPU; `runtime.pinned` adds less than 64 bytes a tensor. resume_bytes: read
    by them, once to check the files and once without the weights that follow from main weights.
    bandwidth: bytes a second that a node's storage writes.
    """
    parameter_bytes = checkpoint_bytes_each(run.config)
    parallel = run.parallel
    updated = run.ranks_per_node * max(stage.updated_parameters for stage in run.stages)
    experts = sum(stage.trained_expert_parameters for stage in run.stages)
    dense = sum(stage.trained_parameters for stage in run.stages) - experts
    num_elements = parallel.tp * dense + parallel.expert_tp * parallel.ep * experts
    total = num_elements * parameter_bytes
    saved = updated * parameter_bytes
    if run.config.lora.rank:
        # One rank writes the factor that all tensor-parallel ranks hold, as large as the other one.
        total = run.num_trained * parameter_bytes
        saved = ceil_div(total * run.ranks_per_node, run.world_size)
    # All ranks share the check of the files, no matter which files each one reads afterwards.
    checked = total * run.ranks_per_node // run.world_size
    return {
        "total_bytes": total,
        "saved_bytes": saved,
        "resume_bytes": checked + updated * STATE_BYTES,
        "bandwidth": run.hardware.storage_bandwidth * run.ranks_per_node,
    }


def engine_elements(run: PlannedRun) -> int:
    """Elements of the weights on the first rank of an engine."""
    if not run.engine.tensor_parallel:
        return run.num_parameters
    return _sharded_elements(run.shape, run.rollout.tp)


@cache
def _sharded_elements(shape: ModelShape, tp: int) -> int:
    """Elements of vLLM's shards on rank 0 of `tp`, padding of the vocabulary included."""
    parameters = vllm_parameters(WeightTable(shape), 0, tp)
    return sum(prod(parameter.shape) for parameter in parameters)


def kv_bytes_per_token(run: PlannedRun) -> float:
    """Bytes of a token's keys and values on one rank of an engine."""
    heads = max(1.0, run.shape.num_kv_heads / run.rollout.tp)
    num_layers = run.shape.num_attention_layers
    return 2 * num_layers * heads * run.shape.head_dim * run.dtype_bytes


def kept_state_bytes(run: PlannedRun) -> float:
    """Bytes that one rank of an engine keeps of a sequence for gated delta nets, at any length."""
    return state_bytes(run.shape, run.dtype_bytes) / run.rollout.tp


def kv_cache_bytes(run: PlannedRun) -> float:
    """Bytes that one rank of an engine has for keys and values, and for the states of gated delta
    nets, at least 0.

    The rules are those of `rollout.vllm.options` and `rollout.hf.engine`.
    """
    rollout, memory_bytes = run.rollout, run.hardware.memory_bytes
    longest = max_engine_tokens(run.config)
    token_bytes, states = kv_bytes_per_token(run), kept_state_bytes(run)
    if not run.engine.refills:
        num_dealt = ceil_div(run.config.responses_per_step, run.num_engines)
        num_rows = min(rollout.batch_size, num_dealt)
        return num_rows * (_HF_CACHE_SLACK * longest * token_bytes + states)
    if rollout.kv_cache_bytes:
        return float(rollout.kv_cache_bytes)
    if not run.hardware.is_cuda:  # a full batch of the longest sequences
        sequence_bytes = longest * token_bytes + states
        return min(sequence_bytes * (rollout.batch_size + 1), memory_bytes / 4)
    weights = engine_elements(run) * run.dtype_bytes
    taken = weights + GRAPH_BYTES + _profiled_bytes(run)
    return max(0.0, rollout.gpu_memory_fraction * memory_bytes - taken)


def _profiled_bytes(run: PlannedRun) -> float:
    """Bytes that vLLM's profiling pass allocates at most, which vLLM then sets aside.

    The larger of one layer's largest part on the largest batch of prompt tokens, feed-forward or
    gated delta net, and the sampler's float32 copies of the logits. Assumption: a gated delta net
    has its projections, queries, keys, values four times and the states of chunks at once.
    """
    shape, rollout = run.shape, run.rollout
    num_tokens = min(
        run.hardware.engine_batch_tokens,
        rollout.batch_size * max_engine_tokens(run.config),
    )
    width = 3.0 * shape.active_ffn_size
    if delta := shape.delta:
        mixer = delta.projected_size + delta.conv_channels + 4 * delta.value_size
        mixer += 2 * delta.num_value_heads * delta.key_head_dim
        width = max(width, mixer + delta.state_size / CHUNK_LENGTH)
    layer = num_tokens * (width / rollout.tp + 4 * shape.hidden_size) * run.dtype_bytes
    sampler = 3 * 4 * rollout.batch_size * shape.vocab_size
    return max(layer, sampler)


def _merge_bytes(run: PlannedRun) -> float:
    """Bytes of the largest weight with its adapter added, and of the float64 sums on the way; 0
    without LoRA.
    """
    if not run.config.lora.rank:
        return 0.0
    return run.largest_weight_bytes + 2 * MERGE_BYTES


def _bucket_bytes(run: PlannedRun) -> float:
    """Bytes of a weight sync: two buckets on their way, or one and a whole embedding."""
    parallel = run.parallel
    bucket = min(
        run.config.sync.bucket_mb * 2**20, run.num_parameters * run.dtype_bytes
    )
    other = bucket
    if parallel.tp * parallel.pp * parallel.ep > 1:
        embedding = run.shape.vocab_size * run.shape.hidden_size * run.dtype_bytes
        other = max(bucket, embedding)
    return float(bucket + other)
