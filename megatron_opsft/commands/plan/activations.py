"""What a rank keeps of its forward passes for the backward passes, by formula; pure.

Two sets of modules. `torch` is what a CPU takes (`model.attention` and Megatron's local layers):
tests compare these lines with what a real step allocates. `te` is TransformerEngine's, after what
its `autograd.Function`s save (2.x: pytorch/module/layernorm_linear.py, linear.py, attention) and
Megatron-Core's fused SwiGLU and rotary kernels; nothing here has measured it.

Letters: h hidden size, q and k elements of a token's queries and of its keys on this rank, f the
feed-forward size on this rank, e bytes of an element. Results of a layer are bytes of one token.
"""

from megatron_opsft.commands.plan.job import Job, Stage
from megatron_opsft.trainer.loss.loss_memory import (
    fused_linear_bytes,
    whole_logits_bytes,
)

_FLOAT = 4
_INDEX = 8


def num_in_flight(job: Job, stage: int, num_microbatches: int) -> float:
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
    job: Job, stage: Stage, num_microbatches: int
) -> tuple[float, float, float]:
    """(kept, needed for a moment in a backward pass, needed for a moment by the loss) on a rank, of
    the largest micro-batch. The loss exists on the last stage alone, never together with the
    second.
    """
    tokens, in_flight = (
        job.microbatch_tokens,
        num_in_flight(job, stage.index, num_microbatches),
    )
    entering, of_layer, again = layer_bytes(job)
    kept = in_flight * tokens * stage.num_layers * of_layer
    moment = tokens * again
    if not stage.has_output:
        kept += in_flight * tokens * entering  # the schedule keeps what it has sent on
        moment += tokens * entering
    if job.sequence_parallel:
        # Megatron gathers a layer's input into one buffer, which it keeps.
        kept += tokens * job.shape.hidden_size * job.dtype_bytes
    # The largest gradient of a weight, in the model's dtype until it is added to the main gradient.
    rows = 2 * job.shape.shard_ffn[1] / job.parallel.expert_tp
    moment += rows * job.shape.hidden_size * job.dtype_bytes
    loss = 0.0
    if stage.has_output:
        while_loss, in_norm = _final_norm(job)
        loss = max(tokens * while_loss + _loss_bytes(job), tokens * in_norm)
    return kept, moment, loss


def layer_bytes(job: Job) -> tuple[float, float, float]:
    """(the hidden states that come in; kept until the backward pass, norms and residuals included;
    needed for a moment in it above that: what is computed again, and gradients), as
    `train.recompute` has it.
    """
    shape, tp = job.shape, job.parallel.tp
    e = job.dtype_bytes
    h = shape.hidden_size / (tp if job.sequence_parallel else 1)
    q = shape.num_heads * shape.head_dim / tp
    k = shape.num_kv_heads * shape.head_dim / tp
    heads, kv_heads = shape.num_heads / tp, shape.num_kv_heads / tp
    qk_norm = shape.qk_norm
    if job.with_te:
        # Norm: its input and its output. Attention: q, k, v after the rotary embedding; its output
        # and log-sum-exp; then the second norm's two, fc1's output, and the activation.
        norm = 2 * h * e + _FLOAT
        attention = norm + e * (2 * q + 2 * k) + _FLOAT * heads
        attention += qk_norm * (e * (q + k) + _FLOAT * (heads + kv_heads))
    else:
        # RMSNorm in float32: input, normalised, output; in bfloat16 the first of them is float32.
        norm = h * (3 * _FLOAT if e == _FLOAT else _FLOAT + 2 * e) + _FLOAT
        # The fused q/k/v (of which v is a view), q and k after the rotary embedding, the output of
        # scaled_dot_product_attention and its copy in token order; cosines and sines of q and k.
        attention = norm + e * (4 * q + 3 * k + 4 * shape.head_dim) + _FLOAT * heads
        of_norm = (2 * _FLOAT, _FLOAT) if e == _FLOAT else (_FLOAT + e, _FLOAT + e)
        attention += qk_norm * (
            of_norm[0] * q + of_norm[1] * k + _FLOAT * (heads + kv_heads)
        )
        if (cp := job.parallel.cp) > 1:
            # The group's keys and values in the order of the pack, and that order; not the fused
            # q/k/v, of which nothing is needed any more, nor this rank's own keys.
            attention += e * (2 * k * cp - q - 3 * k) + _INDEX * cp
    products, gradients = _feed_forward(job, h)
    everything, entering = attention + norm + products, h * e
    if job.config.train.recompute == "none":
        return entering, everything, gradients
    kept = entering
    if job.config.train.recompute == "selective":
        # The feed-forward part is computed again from its input. TransformerEngine's norm is inside
        # that part, where it is dense; everywhere else what the norm keeps stays.
        kept = attention + (entering if job.with_te and shape.moe is None else norm)
    # The output that recomputation makes once more is as large as the input.
    return entering, kept, everything - kept + gradients + entering


def _feed_forward(job: Job, h: float) -> tuple[float, float]:
    """(kept, for a moment in the backward pass: the gradients of fc1's output and of the hidden
    states).
    """
    shape, tp, e = job.shape, job.parallel.tp, job.dtype_bytes
    # torch: silu(gate), up + 0.0 and their product; te: the product alone.
    products = 1 if job.with_te else 3
    if shape.moe is None:
        f = shape.ffn_size / tp
        return e * (2 + products) * f, e * (2 * f + 2 * h)
    # Tokens reach this rank's part of the experts from all ranks that share them: k copies each,
    # with even routing as many as there are of tokens in as many packs as ranks cut an expert.
    moe, f = shape.moe, shape.moe.ffn_size / job.parallel.expert_tp
    copies = moe.top_k * job.parallel.expert_tp / tp
    router = 9 * moe.num_experts / (tp if job.sequence_parallel else 1) + 40 * moe.top_k
    # And the product with the router's weight.
    kept = router + copies * e * (shape.hidden_size + (3 + products) * f)
    return kept, copies * e * (2 * f + 2 * shape.hidden_size) + 2 * h * e


def _final_norm(job: Job) -> tuple[float, float]:
    """Bytes of one token on the last stage: (kept while the loss is computed, the most in the
    norm's own backward pass), the hidden states that enter it and the loss's gradient included.
    """
    e, h = job.dtype_bytes, job.shape.hidden_size
    own = h / (job.parallel.tp if job.sequence_parallel else 1)
    if job.with_te:
        return 2 * own * e, 3 * own * e + h * e
    if e == _FLOAT:
        return 3 * own * e, 7 * own * e
    return own * (_FLOAT + 3 * e), 13 * own * e


def _loss_bytes(job: Job) -> float:
    """At most: every token of the micro-batch is one of a response."""
    tokens, hidden_size, e = (
        job.microbatch_tokens,
        job.shape.hidden_size,
        job.dtype_bytes,
    )
    if job.cross_entropy.kind != "fused_linear":
        return whole_logits_bytes(tokens, hidden_size, job.rows_per_rank, dtype_bytes=e)
    return fused_linear_bytes(
        tokens,
        tokens,
        hidden_size,
        min(job.rows_per_rank, job.shape.vocab_size),  # it never touches padding
        dtype_bytes=e,
        on_cuda=job.hardware.is_cuda,
        sequence_parallel=job.sequence_parallel,
        with_teacher=job.has_teacher,
    )
