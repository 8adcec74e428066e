"""Bytes of activations that a rank stores from its forward for its backward passes, by formula.

Pure. There are two sets of modules. `torch` is what a CPU runs (`model.attention` and Megatron's
local layers); tests compare its formulas with what a real step allocates. `te` is TransformerEngine
with Megatron-Core's fused SwiGLU and rotary kernels. Its formulas follow what its
`autograd.Function`s save (2.x: pytorch/module/layernorm_linear.py, linear.py, attention) and have
not been measured.
"""

from megatron_opsft.commands.plan.job import PlannedRun, Stage
from megatron_opsft.config.training import LoraTarget
from megatron_opsft.models.architectures.shape import CHUNK_LENGTH
from megatron_opsft.runtime.rounding import ceil_div
from megatron_opsft.trainer.loss.loss_memory import (
    fused_linear_bytes,
    whole_logits_bytes,
)

_FLOAT = 4
_INDEX = 8


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
) -> tuple[float, float, float]:
    """Estimate the bytes of activations on a rank of `stage`, for micro-batches of full size.

    The first number counts what is stored until the backward pass, for all micro-batches in flight.
    Beyond that, the second is needed for a moment in a backward pass and the third by the loss,
    never both at once; the third is 0 before the last stage. num_microbatches: how many an update
    has on each data-parallel rank.
    """
    num_tokens = run.microbatch_tokens
    in_flight = num_in_flight(run, stage.index, num_microbatches)
    layer_input = run.hidden_per_rank * run.dtype_bytes
    stored, backward = _stage_bytes(run, stage, layer_input)
    stored *= in_flight * num_tokens
    backward *= num_tokens
    if not stage.has_output:
        # The schedule keeps the hidden states that it has sent to the next stage.
        stored += in_flight * num_tokens * layer_input
        backward += num_tokens * layer_input
    if run.parallel.sequence_shards > 1:
        # Megatron gathers a layer's input into one buffer, which it keeps.
        stored += num_tokens * run.shape.hidden_size * run.dtype_bytes
    if not run.config.lora.rank:
        # The largest gradient of a weight, in the model's dtype until it is added to the main one.
        backward += run.largest_weight_bytes
    loss = _loss_bytes(run) if stage.has_output else 0.0
    return stored, backward, loss


def _stage_bytes(
    run: PlannedRun, stage: Stage, layer_input: float
) -> tuple[float, float]:
    """Bytes of one token in all layers of a stage: stored until the backward pass, and needed for a
    moment in it. layer_input: see `_layer_bytes`.
    """
    layers = stage.layers
    stored, backward = 0.0, 0.0
    if layers.num_attention_layers:
        stored, backward = _layer_bytes(run, layer_input, is_delta=False)
        stored *= layers.num_attention_layers
    if layers.num_delta_layers:
        kept, moment = _layer_bytes(run, layer_input, is_delta=True)
        stored += layers.num_delta_layers * kept
        backward = max(backward, moment)
        begins = stage.index == 0 and layers.kind_of(0) == "linear_attention"
        if begins and run.config.lora.rank and run.train.recompute == "none":
            # The first adapter is mostly behind this gated delta net and the second norm: what is
            # before it needs no gradients, unless recomputation needs those of its inputs. Of the
            # norms only the output of the second stays.
            stored -= _delta_bytes(run)[0] + 2 * (layer_input + _FLOAT)
    return stored, backward


def _layer_bytes(
    run: PlannedRun, layer_input: float, *, is_delta: bool
) -> tuple[float, float]:
    """Bytes of one token in a layer under the run's `train.recompute`.

    The first are stored until the backward pass, norms and residuals included. The second are
    needed for a moment in it: recomputed activations, and gradients. layer_input: bytes of the
    hidden states that enter the layer.
    """
    # An RMSNorm saves its input and its output, and a factor of each token; torch also the
    # normalized input, in float32.
    norm = 2 * layer_input + _FLOAT
    # For the gradient of the norm's weight.
    keeps_normalized = not run.with_te and not run.config.lora.rank
    if keeps_normalized:
        norm += _FLOAT * run.hidden_per_rank
        if run.shape.zero_centered_norms:  # in float32, too
            norm += (_FLOAT - run.dtype_bytes) * run.hidden_per_rank
    feed_forward, gradients = _feed_forward_bytes(run)
    mixer_gradients = 0.0
    if is_delta:
        delta_net, mixer_gradients = _delta_bytes(run)
        mixer = delta_net + norm
    else:
        mixer = _attention_bytes(run) + norm
    if run.config.lora.rank:
        of_attention, of_feed_forward = _adapter_bytes(run)
        if is_delta:  # it gets no adapters, and its frozen weights need no input
            mixer -= layer_input
        else:
            mixer += of_attention
        feed_forward += of_feed_forward
    # When the mixer's turn comes in a backward pass, the feed-forward part is free already.
    moment = max(gradients, mixer_gradients - feed_forward)
    everything = mixer + norm + feed_forward
    match run.train.recompute:
        case "none":
            return everything, moment
        case "full":
            # The input is stored already, but the output is made once more.
            return layer_input, everything + moment
        case "selective":
            # The feed-forward part is recomputed from its input. In a dense layer
            # TransformerEngine's norm is inside that part; everywhere else what the norm saves
            # stays.
            te_norm_is_recomputed = run.with_te and run.shape.moe is None
            stored = mixer + (layer_input if te_norm_is_recomputed else norm)
            # Its output is made once more, too.
            again = everything - stored + gradients + layer_input
            return stored, max(again, mixer_gradients)


def _attention_bytes(run: PlannedRun) -> float:
    """Bytes that attention saves of one token, without the norm before it."""
    shape, dtype_bytes = run.shape, run.dtype_bytes
    tp, cp = run.parallel.tp, run.parallel.cp
    heads, kv_heads = shape.num_heads / tp, shape.num_kv_heads / tp
    queries, keys = heads * shape.head_dim, kv_heads * shape.head_dim
    if run.with_te:
        # Queries, keys and values after the rotary embedding, and the output.
        num_elements = 2 * queries + 2 * keys
        gate_elements = 2 * queries  # and the gated output
        query_norm = key_norm = dtype_bytes
    else:
        # The fused queries, keys and values (values are a view of them), queries and keys after the
        # rotary embedding, the output of scaled_dot_product_attention and its copy in token order;
        # cosines and sines of queries and keys.
        num_turned = shape.rotary_dim or shape.head_dim
        num_elements = 4 * queries + 3 * keys + 4 * num_turned
        gate_elements = 3 * queries  # also in the fused tensor
        normed = _FLOAT if shape.zero_centered_norms else dtype_bytes
        if run.config.lora.rank:  # it is for the gradient of the norm's weight
            normed = 0
        query_norm = _FLOAT + normed
        key_norm = normed if dtype_bytes == _FLOAT else query_norm
    if shape.gated_attention:
        num_elements += gate_elements
    # Beside them, the log-sum-exp of the output.
    num_bytes = dtype_bytes * num_elements + _FLOAT * heads
    if shape.qk_norm:
        # query_norm, key_norm: bytes that these norms save of each element.
        num_bytes += query_norm * queries + key_norm * keys
        num_bytes += _FLOAT * (heads + kv_heads)
    if cp > 1 and not run.with_te:
        # The group's keys and values in the order of the pack, and that order; not the fused
        # tensor, which nothing needs any more, nor this rank's own keys.
        num_bytes += dtype_bytes * (2 * keys * cp - queries - 3 * keys) + _INDEX * cp
    return num_bytes


def _delta_bytes(run: PlannedRun) -> tuple[float, float]:
    """Bytes of one token in a gated delta net on one rank, without the norm before it.

    The first are stored until the backward pass, the second are needed for a moment in it.
    """
    delta, tp, dtype_bytes = run.shape.delta, run.parallel.tp, run.dtype_bytes
    assert delta is not None
    heads = delta.num_value_heads / tp
    # Queries or keys, and values, of all value heads.
    keys, values = heads * delta.key_head_dim, heads * delta.value_head_dim
    projected, mixed = delta.projected_size / tp, delta.conv_channels / tp
    scores = heads * CHUNK_LENGTH
    states = heads * delta.key_head_dim * delta.value_head_dim / CHUNK_LENGTH
    if run.with_te:
        # Megatron-Core's module with flash-linear-attention's kernels, which compute the states of
        # chunks again. What is projected, normed queries and keys, both for each value head, values
        # and the chunks' inverted systems; output, normed output, gate, gated output. Float32: two
        # numbers of each head.
        num_elements = projected + 2 * delta.key_size / tp + 2 * keys + values
        num_elements += scores + 4 * values
        # Gradients of queries, keys, values and states, and what is computed again.
        moment = 4 * keys + 4 * values + 2 * states
        return dtype_bytes * num_elements + 2 * _FLOAT * heads, dtype_bytes * moment
    # The convolution's output, queries and keys with and without their norms, values; output and
    # gate; a few numbers of each head. Then what gradients of frozen weights would need: tokens
    # that the convolution has seen, the last norm's output, the gated output.
    trains_all = not run.config.lora.rank
    if dtype_bytes == _FLOAT:
        num_bytes = _FLOAT * (projected + 2 * mixed + 3 * values)
    else:
        num_bytes = _FLOAT * 4 * values + dtype_bytes * (mixed + values)
        num_bytes += _FLOAT * mixed * trains_all
    num_bytes += _FLOAT * (4 * keys + 7 * heads) + _INDEX
    if trains_all:
        num_bytes += _FLOAT * (delta.conv_size - 1) * mixed + 2 * dtype_bytes * values
    # In chunks; zeros fill up the last one of a sequence, and states are zero before the first.
    num_chunks = ceil_div(run.longest_tokens, CHUNK_LENGTH)
    padding = num_chunks * CHUNK_LENGTH / run.longest_tokens
    keys_in_chunks = 11 - 2 / num_chunks
    chunks = 6 * scores + keys_in_chunks * keys + 3 * values + states + 4 * heads
    moment = 2 * scores + 3 * keys + values
    return num_bytes + _FLOAT * padding * chunks, _FLOAT * padding * moment


def _feed_forward_bytes(run: PlannedRun) -> tuple[float, float]:
    """Bytes of one token in a feed-forward part on one rank.

    The first are stored until the backward pass. The second are gradients in it: of fc1's output
    and of the hidden states.
    """
    shape, parallel, dtype_bytes = run.shape, run.parallel, run.dtype_bytes
    # torch: silu(gate), up + 0.0 and their product; te: the product alone.
    num_products = 1 if run.with_te else 3
    gradients = 2 * run.hidden_per_rank * dtype_bytes
    moe = shape.moe
    if moe is None:
        ffn_bytes = dtype_bytes * shape.ffn_size / parallel.tp
        return (2 + num_products) * ffn_bytes, 2 * ffn_bytes + gradients
    # A rank's experts receive `top_k` copies of every token of all ranks that share the experts.
    # With even routing these are so many for each token of one rank's micro-batch:
    ffn_size = moe.ffn_size / parallel.expert_tp
    copies = moe.top_k * parallel.expert_tp / parallel.tp
    router = 9 * moe.num_experts / run.parallel.sequence_shards + 40 * moe.top_k
    # One product more than in a dense layer: that with the router's weight.
    expert = shape.hidden_size + (3 + num_products) * ffn_size
    gradients += copies * dtype_bytes * (2 * ffn_size + 2 * shape.hidden_size)
    stored = router + copies * dtype_bytes * expert
    if moe.shared_ffn_size:
        # As a dense layer, and its output, which is multiplied by the gate.
        shared = (2 + num_products) * moe.shared_ffn_size / parallel.tp
        stored += dtype_bytes * (shared + run.hidden_per_rank)
    return stored, gradients


def _adapter_bytes(run: PlannedRun) -> tuple[float, float]:
    """Bytes that the adapters of attention and of the feed-forward part save of one token: the r
    numbers A x of each. Their inputs are saved anyway.
    """
    lora, parallel = run.config.lora, run.parallel
    shards = parallel.sequence_shards

    def low_numbers(whole: tuple[LoraTarget, ...], divided: LoraTarget) -> float:
        # Under sequence parallelism the ranks divide the tokens of `divided` layers, whose inputs
        # are cut.
        num_layers = len(set(whole) & set(lora.targets))
        return lora.rank * (num_layers + (divided in lora.targets) / shards)

    attention = low_numbers(("q_proj", "k_proj", "v_proj"), "o_proj")
    if run.shape.moe is None:
        feed_forward = low_numbers(("gate_proj", "up_proj"), "down_proj")
    else:
        copies = run.shape.moe.top_k * parallel.expert_tp / parallel.tp
        feed_forward = lora.rank * len(lora.feed_forward_targets) * copies
        if run.shape.moe.shared_ffn_size:
            feed_forward += low_numbers(("gate_proj", "up_proj"), "down_proj")
    return attention * run.dtype_bytes, feed_forward * run.dtype_bytes


def _loss_bytes(run: PlannedRun) -> float:
    """Bytes of the last norm and the loss at most: every token belongs to a response.

    The norm's input and the loss's gradient are included.
    """
    num_tokens, hidden_size = run.microbatch_tokens, run.shape.hidden_size
    hidden, dtype_bytes = run.hidden_per_rank, run.dtype_bytes
    # Elements of the norm for a token while the loss is computed, and in its backward pass.
    if run.with_te:
        norm, norm_backward = 2 * hidden, 3 * hidden + hidden_size
    elif dtype_bytes == _FLOAT:
        norm, norm_backward = 3 * hidden, 7 * hidden
    else:  # an element in float32 counts as two in bfloat16
        norm, norm_backward = 5 * hidden, 13 * hidden
    if run.cross_entropy.kind == "fused_linear":
        loss = fused_linear_bytes(
            num_tokens,
            hidden_size,
            min(run.rows_per_rank, run.shape.vocab_size),  # it never touches padding
            dtype_bytes=dtype_bytes,
            on_cuda=run.hardware.is_cuda,
            sequence_parallel=run.parallel.sequence_shards > 1,
            with_teacher=run.has_teacher,
        )
    else:
        loss = whole_logits_bytes(
            num_tokens, hidden_size, run.rows_per_rank, dtype_bytes=dtype_bytes
        )
    token_bytes = num_tokens * dtype_bytes
    return max(token_bytes * norm + loss, token_bytes * norm_backward)
