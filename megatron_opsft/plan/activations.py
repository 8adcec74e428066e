"""What a layer keeps of its forward pass for the backward pass, by formula; pure.

Two sets of modules. `torch` is what a CPU takes (`model.attention` and Megatron's local layers):
tests compare these lines with what a real step allocates. `te` is TransformerEngine's, after what
its `autograd.Function`s save (2.x: pytorch/module/layernorm_linear.py, linear.py, attention) and
Megatron-Core's fused SwiGLU and rotary kernels; nothing here has measured it.

Letters: h hidden size, q and k elements of a token's queries and of its keys on this rank, f the
feed-forward size on this rank, e bytes of an element. All results are bytes of one token.
"""

from dataclasses import dataclass

from megatron_opsft.plan.job import TrainingJob

_FLOAT = 4
_INDEX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes of one token in one layer.

    input: the hidden states that come in, kept under full recomputation; attention, feed_forward:
    kept by the two halves otherwise, norms and residuals included; transient: needed for a moment
    in the backward pass of the feed-forward part, above what was kept.
    """

    input: float
    attention: float
    feed_forward: float
    transient: float

    @property
    def kept(self) -> float:
        return self.attention + self.feed_forward


def layer_bytes(job: TrainingJob) -> LayerBytes:
    """The job's model on one of its ranks."""
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
        attention += qk_norm * (of_norm[0] * q + of_norm[1] * k + _FLOAT * (heads + kv_heads))
        if (cp := job.parallel.cp) > 1:
            # The group's keys and values in the order of the pack, and that order; not the fused
            # q/k/v, of which nothing is needed any more, nor this rank's own keys.
            attention += e * (2 * k * cp - q - 3 * k) + _INDEX * cp
    feed_forward, transient = _feed_forward(job, h, norm)
    return LayerBytes(
        input=h * e, attention=attention, feed_forward=feed_forward, transient=transient
    )


def _feed_forward(job: TrainingJob, h: float, norm: float) -> tuple[float, float]:
    """(kept, transient); under the backward pass the gradients of fc1's output and of the hidden
    states are there as well.
    """
    shape, tp, e = job.shape, job.parallel.tp, job.dtype_bytes
    # torch: silu(gate), up + 0.0 and their product; te: the product alone.
    products = 1 if job.with_te else 3
    if shape.moe is None:
        f = shape.ffn_size / tp
        return norm + e * (2 + products) * f, e * (2 * f + 2 * h)
    # Tokens reach this rank's part of the experts from all ranks that share them: k copies each,
    # with even routing as many as there are of tokens in as many packs as ranks cut an expert.
    moe, f = shape.moe, shape.moe.ffn_size / job.parallel.expert_tp
    copies = moe.top_k * job.parallel.expert_tp / tp
    router = 9 * moe.num_experts / (tp if job.sequence_parallel else 1) + 40 * moe.top_k
    # torch: also the product with the router's weight.
    products = 2 if job.with_te else 4
    kept = copies * e * (shape.hidden_size + (2 + products) * f)
    transient = copies * e * (2 * f + 2 * shape.hidden_size) + 2 * h * e
    return norm + router + kept, transient


def kept_bytes(job: TrainingJob, layer: LayerBytes) -> float:
    """Bytes of one token in one layer until the backward pass, as `train.recompute` has it."""
    if job.config.train.recompute == "full":
        return layer.input
    if job.config.train.recompute == "selective":
        return layer.attention + _norm_before_recomputation(job)
    return layer.kept


def recomputed_bytes(job: TrainingJob, layer: LayerBytes) -> float:
    """Bytes of one token in the one layer whose backward pass is under way: what is computed
    again, and the gradients of the moment.
    """
    if job.config.train.recompute == "none":
        return layer.transient
    hidden = layer.input  # the output that recomputation makes once more
    if job.config.train.recompute == "full":
        return layer.kept - layer.input + layer.transient + hidden
    return layer.kept - kept_bytes(job, layer) + layer.transient + hidden


def _norm_before_recomputation(job: TrainingJob) -> float:
    """`selective` computes the feed-forward part again from its input. TransformerEngine's norm is
    inside that part, where it is dense: only the hidden states stay. Everywhere else the norm comes
    before, and what it keeps stays too.
    """
    e = job.dtype_bytes
    h = job.shape.hidden_size / (job.parallel.tp if job.sequence_parallel else 1)
    if job.with_te:
        return h * e if job.shape.moe is None else 2 * h * e + _FLOAT
    return h * (3 * _FLOAT if e == _FLOAT else _FLOAT + 2 * e) + _FLOAT


def final_norm_bytes(job: TrainingJob) -> tuple[float, float]:
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
