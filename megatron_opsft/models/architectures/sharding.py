"""Checks that a model can be cut: into a trainer's parallel layout, and among an engine's ranks."""

from megatron_opsft.config.training import ParallelConfig
from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.shape import DeltaShape, ModelShape
from megatron_opsft.runtime.rounding import round_up

_VOCABULARY_MULTIPLE = 64


def check_layout(shape: ModelShape, parallel: ParallelConfig) -> None:
    """Check that the model can be cut as `parallel` says.

    Errors: `UserError` naming the number that the layout does not divide, or the wrong key.
    """
    etp_key = "etp" if parallel.etp else "tp"
    _check_divides("tp", parallel.tp, shape.num_heads, "attention heads")
    _check_divides("tp", parallel.tp, shape.num_kv_heads, "key/value heads")
    _check_divides(etp_key, parallel.expert_tp, shape.shard_ffn[1], "feed-forward size")
    if shape.delta is not None:
        _check_delta(shape.delta, parallel)
    if shape.moe is not None:
        _check_divides(
            "tp",
            parallel.tp,
            shape.moe.shared_ffn_size,
            "feed-forward size of the shared expert",
        )
        _check_divides("ep", parallel.ep, shape.moe.num_experts, "experts")
    if shape.moe is None and (parallel.ep > 1 or parallel.etp):
        key = "ep" if parallel.ep > 1 else "etp"
        raise UserError(
            f"parallel.{key}={getattr(parallel, key)}: the model has no experts; leave it out"
        )
    if parallel.ep == 1 and parallel.expert_tp != parallel.tp:
        raise UserError(
            f"parallel.etp={parallel.etp} other than parallel.tp={parallel.tp} needs parallel.ep "
            "above 1; leave it out"
        )
    if shape.moe is not None and parallel.tp > 1 and not parallel.sequence_parallel:
        raise UserError(
            f"parallel.tp={parallel.tp} with a mixture of experts needs "
            "parallel.sequence_parallel=true"
        )
    stages = parallel.pp * (parallel.vpp or 1)
    if shape.num_layers % stages:
        raise UserError(
            f"parallel.pp={parallel.pp} x vpp={parallel.vpp or 1} does not divide the model's "
            f"{shape.num_layers} layers"
        )
    if parallel.vpp and parallel.pp < 2:
        raise UserError(f"parallel.vpp={parallel.vpp} needs parallel.pp of at least 2")


def _check_delta(delta: DeltaShape, parallel: ParallelConfig) -> None:
    heads = (("key", delta.num_key_heads), ("value", delta.num_value_heads))
    for name, number in heads:
        _check_divides("tp", parallel.tp, number, f"gated delta net {name} heads")
    if parallel.cp > 1:
        raise UserError(
            f"parallel.cp={parallel.cp}: a gated delta net goes through tokens one by one, so "
            "ranks cannot divide them; set parallel.cp=1 and raise parallel.tp or pp"
        )


def stage_layers(num_layers: int, parallel: ParallelConfig, stage: int) -> list[int]:
    """Return the global indices of the layers of a pipeline stage. With `parallel.vpp` they are
    several runs of layers, between which lie one run of each other stage.
    """
    num_chunks = parallel.vpp or 1
    size = num_layers // (parallel.pp * num_chunks)
    layers: list[int] = []
    for chunk in range(num_chunks):
        first = (chunk * parallel.pp + stage) * size
        layers += range(first, first + size)
    return layers


def _check_divides(key: str, size: int, number: int, name: str) -> None:
    if number % size:
        raise UserError(
            f"parallel.{key}={size} does not divide the model's {number} {name}; "
            f"use a divisor of {number}"
        )


def check_rollout_tp(shape: ModelShape, tp_size: int) -> None:
    """Check that vLLM can cut this model into `tp_size` shards. Errors: `UserError`."""
    divide(shape.num_heads, tp_size, "num_attention_heads", "rollout.tp")
    if shape.num_kv_heads % tp_size and tp_size % shape.num_kv_heads:
        raise UserError(
            f"rollout.tp={tp_size} is neither a divisor nor a multiple of "
            f"num_key_value_heads={shape.num_kv_heads}"
        )
    if shape.delta is not None:
        key_heads, value_heads = shape.delta.num_key_heads, shape.delta.num_value_heads
        divide(key_heads, tp_size, "linear_num_key_heads", "rollout.tp")
        divide(value_heads, tp_size, "linear_num_value_heads", "rollout.tp")
    name, size = shape.shard_ffn
    divide(size, tp_size, name, "rollout.tp")
    if shape.moe is not None:
        divide(
            shape.moe.shared_ffn_size,
            tp_size,
            "shared_expert_intermediate_size",
            "rollout.tp",
        )
    divide(padded_vocabulary(shape), tp_size, "the padded vocab_size", "rollout.tp")
    if shape.moe is not None and tp_size > shape.moe.num_experts:
        raise UserError(
            f"rollout.tp={tp_size} is more than num_experts={shape.moe.num_experts}"
        )


def padded_vocabulary(shape: ModelShape) -> int:
    return round_up(shape.vocab_size, _VOCABULARY_MULTIPLE)


def divide(size: int, tp_size: int, what: str, key: str = "parallel.tp") -> int:
    """Return the size of one of `tp_size` equal slices.

    Errors: `UserError` that names the key and what it should divide.
    """
    if size % tp_size:
        raise UserError(
            f"{key}={tp_size} does not divide {what}={size}; choose a divisor of {size}"
        )
    return size // tp_size
