"""Seconds of the parts of a step, as pure functions of sizes and of a device's figures.

Each is a roofline: the products at the achieved share of peak, bytes at the achieved share of
bandwidth. No Megatron, no process group.
"""

from dataclasses import dataclass, replace
from typing import Any

from megatron_opsft.architectures.flops import forward_flops, layer_weights
from megatron_opsft.architectures.shape import ModelShape
from megatron_opsft.plan.hardware import Hardware
from megatron_opsft.plan.job import TrainingJob

# One all-reduce of a few kilobytes between the ranks of an engine; vLLM's own kernel takes 5-15 us.
_SMALL_ALL_REDUCE_SECONDS = 10e-6
# Bytes that AdamW moves for an element of this rank's part: gradient, main weight and two moments
# read, the last three and the model's weight written.
_OPTIMIZER_BYTES = 30.0
# And for each element of the gradient buffer: zeroed, scaled (read and written), read for its norm.
_GRADIENT_BYTES = 16.0
# Of the memory's bandwidth, by kernels that do nothing else. Assumption.
_STREAM_FRACTION = 0.8


def sequence_seconds(
    job: TrainingJob, num_layers: int, num_tokens: Any, num_loss_tokens: Any
) -> tuple[Any, Any]:
    """(forward, backward) pass of one sequence of a packed micro-batch through `num_layers` layers
    of one rank, beside what a micro-batch costs whatever is in it; arrays give arrays.

    num_loss_tokens: 0 unless the rank has the output layer. A backward pass is two forward passes
    of products, and recomputation one more (full), or that of the feed-forward parts (selective).
    Tensor parallelism exchanges the hidden states twice a layer and pass, ring algorithm:
    2 (n - 1) / n of their bytes (Shoeybi et al., 2019); experts those of every expert that a token
    goes to, and expert parallelism sends these there and back. Context parallelism lets keys and
    values go round, backward with their gradients; as if no attention hid it. A pipeline hands
    hidden states on once.
    """
    hardware, tp, cp, pp = job.hardware, job.parallel.tp, job.parallel.cp, job.parallel.pp
    stage = replace(job.shape, num_layers=num_layers)
    rate = hardware.peak_flops * hardware.training_fraction * tp * cp
    forward = forward_flops(stage, [num_tokens], num_loss_tokens) / rate
    hidden_bytes = num_tokens * stage.hidden_size * job.dtype_bytes / cp
    of_attention = num_layers * ring_seconds(2 * hidden_bytes, tp, tp, hardware)
    of_feed_forward = num_layers * _feed_forward_exchange(job, hidden_bytes)
    exchange = of_attention + of_feed_forward
    kv_elements = 2 * num_tokens * stage.num_kv_heads * stage.head_dim / tp
    round_trip = num_layers * ring_seconds(kv_elements * job.dtype_bytes, cp, tp * cp, hardware)
    hand_on = 0.0
    if pp > 1:  # the next stage begins as many ranks away as a stage has
        bandwidth = hardware.bandwidth(job.world_size // pp + 1)
        hand_on = hidden_bytes / (bandwidth * hardware.collective_fraction)
    again = 0.0
    if job.config.train.recompute == "full":
        again = forward_flops(stage, [num_tokens], 0) / rate + exchange + round_trip
    elif job.config.train.recompute == "selective":
        again = 2.0 * num_tokens * _feed_forward_weights(stage) * num_layers / rate
        again = again + of_feed_forward
    exchange = exchange + round_trip
    # TransformerEngine's attention sends keys and values round again, to get their gradients.
    back = round_trip if job.modules == "te" else 0.0
    return forward + exchange + hand_on, 2 * forward + exchange + back + again + hand_on


def _feed_forward_exchange(job: TrainingJob, hidden_bytes: Any) -> Any:
    """Of one layer. hidden_bytes: of the tokens of a tensor-parallel group."""
    parallel, moe = job.parallel, job.shape.moe
    if moe is None:
        return ring_seconds(2 * hidden_bytes, parallel.tp, parallel.tp, job.hardware)
    chosen = moe.top_k * hidden_bytes / parallel.tp  # what a rank's own tokens are, for all experts
    there_and_back = ring_seconds(
        2 * chosen, parallel.ep, parallel.ep * parallel.expert_tp, job.hardware
    )
    gathered = 2 * chosen * parallel.expert_tp
    return there_and_back + ring_seconds(
        gathered, parallel.expert_tp, parallel.expert_tp, job.hardware
    )


def _feed_forward_weights(shape: ModelShape) -> int:
    """Weights of one layer's feed-forward part that one token meets."""
    heads = 2 * shape.num_heads + 2 * shape.num_kv_heads
    return layer_weights(shape) - shape.hidden_size * shape.head_dim * heads


def ring_seconds(num_bytes: Any, size: int, span: int, hardware: Hardware) -> Any:
    """A reduce-scatter or all-gather of so many bytes between `size` ranks; an all-reduce is two.

    span: ranks between the first and the last of them, which decides whether a node holds them all.
    """
    if size == 1:
        return 0.0
    rate = hardware.bandwidth(span) * hardware.collective_fraction
    return num_bytes * (size - 1) / size / rate


def optimizer_seconds(num_parameters: float, dp: int, hardware: Hardware) -> float:
    """The update of this rank's part, and what the whole gradient buffer goes through around it."""
    moved = num_parameters * (_OPTIMIZER_BYTES / dp + _GRADIENT_BYTES)
    return moved / (hardware.memory_bandwidth * _STREAM_FRACTION)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSizes:
    """What a decoding step reads on one rank of an engine.

    read_bytes: weights of all products, of a mixture without experts; expert_bytes: of one expert
    in all layers. kv_bytes: keys and values of one token. flops: of one token.
    """

    tp: int
    read_bytes: float
    expert_bytes: float
    num_experts: int
    top_k: int
    kv_bytes: float
    flops: float
    num_layers: int


def engine_sizes(shape: ModelShape, tp: int, dtype_bytes: int) -> EngineSizes:
    """One rank of a vLLM engine; a key/value head is on several ranks where there are fewer."""
    moe = shape.moe
    head = shape.hidden_size * shape.vocab_size
    weights = layer_weights(shape)
    expert = 3 * shape.hidden_size * moe.ffn_size if moe else 0
    shared = weights - expert * (moe.top_k if moe else 0)
    kv_heads = max(1.0, shape.num_kv_heads / tp)
    return EngineSizes(
        tp=tp,
        read_bytes=(shared * shape.num_layers + head) * dtype_bytes / tp,
        expert_bytes=expert * shape.num_layers * dtype_bytes / tp,
        num_experts=moe.num_experts if moe else 0,
        top_k=moe.top_k if moe else 0,
        kv_bytes=2.0 * shape.num_layers * kv_heads * shape.head_dim * dtype_bytes,
        flops=2.0 * (weights * shape.num_layers + head) / tp,
        num_layers=shape.num_layers,
    )


def decode_step_seconds(
    engine: EngineSizes, hardware: Hardware, batch: int, context: float
) -> float:
    """A forward pass over one token of each of `batch` sequences that hold `context` tokens
    together: weights are read once, and of the experts those that some token goes to, as if it
    chose evenly.
    """
    num_bytes = engine.read_bytes + engine.kv_bytes * context
    if engine.num_experts:
        missed = (1 - engine.top_k / engine.num_experts) ** batch
        num_bytes += engine.expert_bytes * engine.num_experts * (1 - missed)
    reading = num_bytes / (hardware.memory_bandwidth * hardware.decode_fraction)
    products = engine.flops * batch / (hardware.peak_flops * hardware.prefill_fraction)
    return max(reading, products) + decode_step_overhead(engine, hardware)


def decode_step_overhead(engine: EngineSizes, hardware: Hardware) -> float:
    """Seconds of a decoding step that do not depend on what is read."""
    exchanges = 2 * engine.num_layers * _SMALL_ALL_REDUCE_SECONDS if engine.tp > 1 else 0.0
    return hardware.decode_overhead_seconds + exchanges


def prefill_seconds(
    shape: ModelShape, hardware: Hardware, prompt_tokens: int, num_prompts: float, tp: int
) -> float:
    """Reading prompts, each once: the responses to one share it through the prefix cache."""
    flops = forward_flops(shape, [prompt_tokens], 1) * num_prompts
    return flops / (hardware.peak_flops * hardware.prefill_fraction * tp)


def push_seconds(received_bytes: float, hardware: Hardware, *, across_nodes: float) -> float:
    """A device receives so many bytes, or sends them where those are more; across_nodes: the share
    that comes from other nodes.

    Local copies and the checksums read memory, which is far faster, and are in the overhead.
    """
    over_network = received_bytes * across_nodes / hardware.network_bandwidth
    inside = received_bytes * (1 - across_nodes) / hardware.link_bandwidth
    return max(over_network, inside) / hardware.push_fraction + hardware.push_overhead_seconds
