"""Bytes of activations that a rank stores from its forward for its backward passes, by formula.

Pure. There are two sets of modules. `torch` is what a CPU runs (`model.attention` and Megatron's
local layers); tests compare its formulas with what a real step allocates. `te` is TransformerEngine
with Megatron-Core's fused SwiGLU and rotary kernels. Its formulas follow what its
`autograd.Function`s save (2.x: pytorch/module/layernorm_linear.py, linear.py, attention) and have
not been measured.
"""

from typing import NamedTuple

from megatron_opsft.commands.plan.job import PlannedRun, Stage
from megatron_opsft.trainer.loss.loss_memory import (
    fused_linear_bytes,
    whole_logits_bytes,
)

_FLOAT = 4
_INDEX = 8


class ActivationBytes(NamedTuple):
    """Bytes of activations on one rank, with micro-batches of the largest size."""

    stored: float
    """Stored until the backward pass, for all micro-batches in flight."""
    backward: float
    """Needed for a moment in a backward pass, in addition to `stored`."""
    loss: float
    """Needed for a moment by the loss, never at the same time as `backward`; 0 before the last
    stage.
    """


class LayerBytes(NamedTuple):
    """Bytes of one token in one layer on one rank."""

    input: float
    """The hidden states that enter the layer."""
    stored: float
    """Stored until the backward pass, norms and residuals included."""
    backward: float
    """Needed for a moment in the backward pass: recomputed activations, and gradients."""


class _TokenSizes(NamedTuple):
    """Elements of one token in attention and norms, on one rank."""

    hidden: float
    """Hidden size, divided under sequence parallelism."""
    queries: float
    keys: float
    """Elements of its keys; its values are as many."""
    heads: float
    kv_heads: float


class _FeedForwardBytes(NamedTuple):
    """Bytes of one token in a feed-forward part on one rank."""

    stored: float
    backward: float
    """Gradients of fc1's output and of the hidden states."""


class _FinalNormBytes(NamedTuple):
    """Bytes of one token in the last stage's norm, its input and the loss's gradient included."""

    during_loss: float
    """Stored while the loss is computed."""
    in_backward: float
    """Peak of the norm's own backward pass."""


def num_in_flight(run: PlannedRun, stage_index: int, num_microbatches: int) -> float:
    """Number of micro-batches whose activations a rank stores at once, for all its layers.

    1F1B: a stage runs ahead by one micro-batch for each stage after it. Interleaved: by two for
    each of those, and by one round of all its chunks but the last (Narayanan et al., 2021).
    """
    pp, vpp = run.parallel.pp, run.parallel.vpp
    if vpp is None:
        return min(pp - stage_index, num_microbatches)
    num_chunks = 2 * (pp - stage_index - 1) + (vpp - 1) * pp + 1
    return min(num_chunks, num_microbatches * vpp) / vpp


def activation_bytes(
    run: PlannedRun, stage: Stage, num_microbatches: int
) -> ActivationBytes:
    """Estimate the bytes of activations on a rank of `stage`.

    num_microbatches: of one update, on each data-parallel rank.
    """
    num_tokens = run.microbatch_tokens
    in_flight = num_in_flight(run, stage.index, num_microbatches)
    layer = layer_bytes(run)
    stored = in_flight * num_tokens * stage.num_layers * layer.stored
    backward = num_tokens * layer.backward
    if not stage.has_output:
        # The schedule keeps the hidden states that it has sent to the next stage.
        stored += in_flight * num_tokens * layer.input
        backward += num_tokens * layer.input
    if run.sequence_parallel:
        # Megatron gathers a layer's input into one buffer, which it keeps.
        stored += num_tokens * run.shape.hidden_size * run.dtype_bytes
    # The largest gradient of a weight, in the model's dtype until it is added to the main gradient.
    num_rows = 2 * run.shape.shard_ffn[1] / run.parallel.expert_tp
    backward += num_rows * run.shape.hidden_size * run.dtype_bytes
    loss = 0.0
    if stage.has_output:
        norm = _final_norm_bytes(run)
        loss = num_tokens * norm.during_loss + _loss_bytes(run)
        loss = max(loss, num_tokens * norm.in_backward)
    return ActivationBytes(stored, backward, loss)


def layer_bytes(run: PlannedRun) -> LayerBytes:
    """Compute the activations of a layer under the run's `train.recompute`."""
    tp = run.parallel.tp
    sizes = _TokenSizes(
        hidden=run.shape.hidden_size / run.sequence_shards,
        queries=run.shape.num_heads * run.shape.head_dim / tp,
        keys=run.shape.num_kv_heads * run.shape.head_dim / tp,
        heads=run.shape.num_heads / tp,
        kv_heads=run.shape.num_kv_heads / tp,
    )
    norm = _norm_bytes(run, sizes)
    if run.with_te:
        attention = _te_attention_bytes(run, sizes, norm)
    else:
        attention = _torch_attention_bytes(run, sizes, norm)
    feed_forward = _feed_forward_bytes(run, sizes)
    everything = attention + norm + feed_forward.stored
    layer_input = sizes.hidden * run.dtype_bytes
    recompute = run.train.recompute
    if recompute == "none":
        return LayerBytes(layer_input, everything, feed_forward.backward)
    stored = layer_input
    if recompute == "selective":
        # The feed-forward part is recomputed from its input. In a dense layer TransformerEngine's
        # norm is inside that part; everywhere else what the norm saves stays.
        te_norm_is_recomputed = run.with_te and run.shape.moe is None
        stored = attention + (layer_input if te_norm_is_recomputed else norm)
    # The output that recomputation makes once more is as large as the input.
    backward = everything - stored + feed_forward.backward + layer_input
    return LayerBytes(layer_input, stored, backward)


def _norm_bytes(run: PlannedRun, sizes: _TokenSizes) -> float:
    """Bytes that an RMSNorm saves of one token."""
    dtype_bytes = run.dtype_bytes
    if run.with_te:  # its input and its output
        return 2 * sizes.hidden * dtype_bytes + _FLOAT
    if dtype_bytes == _FLOAT:  # its input, the normalized input, its output
        return sizes.hidden * (3 * _FLOAT) + _FLOAT
    # The same three; the input was converted to float32.
    return sizes.hidden * (_FLOAT + 2 * dtype_bytes) + _FLOAT


def _te_attention_bytes(run: PlannedRun, sizes: _TokenSizes, norm: float) -> float:
    """Bytes that TransformerEngine's attention saves of one token, `norm` before it included."""
    # Queries, keys and values after the rotary embedding; the output, and its log-sum-exp.
    num_bytes = norm + run.dtype_bytes * (2 * sizes.queries + 2 * sizes.keys)
    num_bytes += _FLOAT * sizes.heads
    if run.shape.qk_norm:
        qk_norm = run.dtype_bytes * (sizes.queries + sizes.keys)
        num_bytes += qk_norm + _FLOAT * (sizes.heads + sizes.kv_heads)
    return num_bytes


def _torch_attention_bytes(run: PlannedRun, sizes: _TokenSizes, norm: float) -> float:
    """Bytes that attention in plain torch saves of one token, `norm` before it included."""
    dtype_bytes, cp = run.dtype_bytes, run.parallel.cp
    queries, keys = sizes.queries, sizes.keys
    # The fused queries, keys and values (values are a view of them), queries and keys after the
    # rotary embedding, the output of scaled_dot_product_attention and its copy in token order;
    # cosines and sines of queries and keys.
    num_elements = 4 * queries + 3 * keys + 4 * run.shape.head_dim
    num_bytes = norm + dtype_bytes * num_elements + _FLOAT * sizes.heads
    if run.shape.qk_norm:
        # Bytes that these norms save of each element of the queries and of the keys.
        query_bytes = _FLOAT + dtype_bytes
        key_bytes = _FLOAT if dtype_bytes == _FLOAT else _FLOAT + dtype_bytes
        num_bytes += (
            query_bytes * queries
            + key_bytes * keys
            + _FLOAT * (sizes.heads + sizes.kv_heads)
        )
    if cp > 1:
        # The group's keys and values in the order of the pack, and that order; not the fused
        # tensor, which nothing needs any more, nor this rank's own keys.
        num_bytes += dtype_bytes * (2 * keys * cp - queries - 3 * keys) + _INDEX * cp
    return num_bytes


def _feed_forward_bytes(run: PlannedRun, sizes: _TokenSizes) -> _FeedForwardBytes:
    shape, parallel, dtype_bytes = run.shape, run.parallel, run.dtype_bytes
    # torch: silu(gate), up + 0.0 and their product; te: the product alone.
    num_products = 1 if run.with_te else 3
    if shape.moe is None:
        ffn_size = shape.ffn_size / parallel.tp
        return _FeedForwardBytes(
            stored=dtype_bytes * (2 + num_products) * ffn_size,
            backward=dtype_bytes * (2 * ffn_size + 2 * sizes.hidden),
        )
    # A rank's experts receive `top_k` copies of every token of all ranks that share the experts.
    # With even routing these are so many for each token of one rank's micro-batch:
    moe = shape.moe
    ffn_size = moe.ffn_size / parallel.expert_tp
    copies = moe.top_k * parallel.expert_tp / parallel.tp
    router = 9 * moe.num_experts / run.sequence_shards + 40 * moe.top_k
    # One product more than in a dense layer: that with the router's weight.
    expert = shape.hidden_size + (3 + num_products) * ffn_size
    expert_gradients = copies * dtype_bytes * (2 * ffn_size + 2 * shape.hidden_size)
    return _FeedForwardBytes(
        stored=router + copies * dtype_bytes * expert,
        backward=expert_gradients + 2 * sizes.hidden * dtype_bytes,
    )


def _final_norm_bytes(run: PlannedRun) -> _FinalNormBytes:
    dtype_bytes, hidden_size = run.dtype_bytes, run.shape.hidden_size
    sharded = hidden_size / run.sequence_shards
    if run.with_te:
        return _FinalNormBytes(
            during_loss=2 * sharded * dtype_bytes,
            in_backward=3 * sharded * dtype_bytes + hidden_size * dtype_bytes,
        )
    if dtype_bytes == _FLOAT:
        return _FinalNormBytes(3 * sharded * dtype_bytes, 7 * sharded * dtype_bytes)
    return _FinalNormBytes(
        sharded * (_FLOAT + 3 * dtype_bytes), 13 * sharded * dtype_bytes
    )


def _loss_bytes(run: PlannedRun) -> float:
    """Bytes of the loss, at most: every token of the micro-batch belongs to a response."""
    num_tokens, hidden_size = run.microbatch_tokens, run.shape.hidden_size
    if run.cross_entropy.kind != "fused_linear":
        return whole_logits_bytes(
            num_tokens, hidden_size, run.rows_per_rank, dtype_bytes=run.dtype_bytes
        )
    return fused_linear_bytes(
        num_tokens,
        hidden_size,
        min(run.rows_per_rank, run.shape.vocab_size),  # it never touches padding
        dtype_bytes=run.dtype_bytes,
        on_cuda=run.hardware.is_cuda,
        sequence_parallel=run.sequence_parallel,
        with_teacher=run.has_teacher,
    )
