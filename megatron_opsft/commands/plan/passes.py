"""Seconds of training passes through a pipeline stage, and of the exchanges between its ranks.

Pure formulas, without the phase's factor of the device.
"""

from collections.abc import Sequence

from megatron_opsft.commands.plan.job import PlannedRun, Stage
from megatron_opsft.models.architectures.shape import (
    feed_forward_weights,
    forward_flops,
    weight_flops,
)


def pipeline_seconds(run: PlannedRun, stages: Sequence[float], count: int) -> float:
    """Seconds of a pipeline; stages: seconds that each is busy with `count` micro-batches.

    The slowest stage sets the pace. The others' passes of one micro-batch, or of one chunk if
    stages are interleaved, fill and drain the pipeline (Narayanan et al., 2021).
    """
    slowest = max(stages)
    fill_and_drain = (sum(stages) - slowest) / count / (run.parallel.vpp or 1)
    return slowest + fill_and_drain


def pass_seconds(
    run: PlannedRun, stage: Stage, sequences: Sequence[int], num_loss_tokens: int
) -> tuple[float, float]:
    """Estimate the seconds of forward and of backward passes through one rank of a stage.

    The passes go through all its layers, without fixed costs. sequences: tokens of each.
    num_loss_tokens: 0 unless the stage has the output layer.

    A backward pass costs as much as two forward passes of GEMMs; with LoRA the one of them that
    computes gradients of weights is left out, and adapters are added. Recomputation adds one more
    (full), or that of the feed-forward parts (selective). Tensor parallelism exchanges hidden
    states twice a layer and pass (Shoeybi et al., 2019), expert parallelism there and back. Context
    parallelism passes keys and values round a ring; no overlap with attention is assumed. A
    pipeline sends hidden states to the next stage once.
    """
    parallel, shape, num_tokens = run.parallel, stage.layers, sum(sequences)
    tp, cp, dtype_bytes = parallel.tp, parallel.cp, run.dtype_bytes
    num_layers = shape.num_layers
    rate = run.hardware.peak_flops * tp * cp
    gemms = forward_flops(shape, sequences, num_loss_tokens) / rate
    weight_gemms = weight_flops(shape, num_tokens, num_loss_tokens) / rate
    adapter_gemms = stage.adapter_share * weight_gemms
    hidden_bytes = num_tokens * shape.hidden_size * dtype_bytes / cp
    feed_forward = num_layers * _feed_forward_exchange(run, hidden_bytes)
    exchange = num_layers * ring_seconds(run, 2 * hidden_bytes, tp, tp) + feed_forward
    kv_bytes = 2 * num_tokens * shape.num_kv_heads * shape.head_dim * dtype_bytes / tp
    kv_ring = shape.num_attention_layers * ring_seconds(run, kv_bytes, cp, tp * cp)
    send = 0.0
    if parallel.pp > 1:  # the next stage is as many ranks away as a stage has
        distance = run.world_size // parallel.pp
        send = hidden_bytes / run.hardware.bandwidth(distance + 1)
    recomputed = 0.0
    if run.train.recompute == "full":
        recomputed = forward_flops(shape, sequences, 0) / rate + exchange + kv_ring
    elif run.train.recompute == "selective":
        weights = feed_forward_weights(shape)
        recomputed = 2.0 * num_tokens * weights * num_layers / rate + feed_forward
    exchange += kv_ring
    # TransformerEngine sends keys and values round once more, to get their gradients.
    kv_gradients = kv_ring if run.with_te else 0.0
    backward = 2 * (gemms + adapter_gemms) + exchange + kv_gradients + recomputed + send
    if stage.adapter_share:
        backward -= weight_gemms  # frozen weights need no gradients
    return gemms + adapter_gemms + exchange + send, backward


def _feed_forward_exchange(run: PlannedRun, hidden_bytes: float) -> float:
    """Seconds of the exchanges in one feed-forward part.

    hidden_bytes: hidden states of all tokens of a tensor-parallel group.
    """
    tp, ep, etp = run.parallel.tp, run.parallel.ep, run.parallel.expert_tp
    if run.shape.moe is None:
        return ring_seconds(run, 2 * hidden_bytes, tp, tp)
    # The copies of a rank's own tokens that go to all experts.
    routed_bytes = run.shape.moe.top_k * hidden_bytes / tp
    seconds = ring_seconds(run, 2 * routed_bytes, ep, ep * etp)  # there and back
    seconds += ring_seconds(run, 2 * routed_bytes * etp, etp, etp)
    if run.shape.moe.shared_ffn_size:  # cut as a dense layer is
        seconds += ring_seconds(run, 2 * hidden_bytes, tp, tp)
    return seconds


def ring_seconds(run: PlannedRun, num_bytes: float, size: int, span: int) -> float:
    """Seconds of a reduce-scatter or all-gather between `size` ranks; an all-reduce is two.

    span: number of ranks from the first to the last of them, which decides if one node holds all.
    """
    return num_bytes * (size - 1) / size / run.hardware.bandwidth(span)


def shared_seconds(run: PlannedRun, stage: Stage, num_bytes: float) -> float:
    """Seconds to exchange `num_bytes` of a stage's trained weights among their copies."""
    span = run.world_size // run.parallel.pp
    experts = num_bytes * stage.trained_expert_parameters / stage.trained_parameters
    dense_seconds = ring_seconds(run, num_bytes - experts, run.num_copies, span)
    return dense_seconds + ring_seconds(run, experts, run.num_expert_copies, span)
