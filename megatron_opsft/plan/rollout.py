"""Seconds of the rollout and of the weight sync with its engines, by formula; pure.

The responses to a problem go to one engine, and the phase ends with the engine that has the longest
response. A decoding step reads the weights once and every sequence's keys and values.
"""

from collections.abc import Sequence

from megatron_opsft.architectures.shape import forward_flops, layer_weights
from megatron_opsft.plan.job import Job
from megatron_opsft.plan.memory import engine_elements, kv_bytes_per_token, kv_cache_bytes
from megatron_opsft.plan.training import shared_seconds

# One all-reduce of a few kilobytes between the ranks of an engine; vLLM's own kernel takes 5-15 us.
_SMALL_ALL_REDUCE_SECONDS = 6e-6


def rollout_seconds(job: Job) -> dict[str, float]:
    """Of the engine that has most to do: rollout is `prefill` and `decode`, of which `decode_fixed`
    reads nothing. With fixed data there is nothing to do.
    """
    share, at_once = busiest_engine(job)
    if not share:
        return dict.fromkeys(("rollout", "prefill", "decode", "decode_fixed"), 0.0)
    work, hardware, factor = job.workload, job.hardware, job.hardware.rollout_factor
    decode, steps = decode_seconds(job, share, work.prompt_tokens, at_once)
    # The responses to a problem share its prompt.
    problems = -(-job.config.data.prompts_per_step // job.num_engines)
    flops = forward_flops(job.shape, [work.prompt_tokens], 1) * problems
    prefill = factor * flops / (hardware.peak_flops * job.config.rollout.tp)
    return {
        "rollout": prefill + factor * decode,
        "prefill": prefill,
        "decode": factor * decode,
        "decode_fixed": factor * steps * fixed_seconds(job),
    }


def busiest_engine(job: Job) -> tuple[list[int], int]:
    """(lengths of its responses, in ascending order; how many of them it decodes at once)."""
    work, rollout = job.workload, job.config.rollout
    if not work.lengths:
        return [], 0
    total = len(work.lengths)
    count = -(-job.config.data.prompts_per_step // job.num_engines) * rollout.group_size
    if not job.engine.refills:  # it deals responses, not problems
        count = -(-total // job.num_engines)
    # Spread over the lengths of all; the longest of them is there.
    share = [work.lengths[total - 1 - i * total // count] for i in reversed(range(count))]
    at_once = min(rollout.batch_size, count)
    if job.engine.refills:  # vLLM puts off what its cache has no room for
        mean = work.prompt_tokens + work.mean_tokens
        room = kv_cache_bytes(job) / (kv_bytes_per_token(job) * mean)
        at_once = max(1, min(at_once, int(room)))
    return share, at_once


def decode_seconds(
    job: Job, share: Sequence[int], prompt_tokens: int, slots: int
) -> tuple[float, float]:
    """(seconds without the factor, decoding steps) of an engine that decodes responses of these
    lengths, in ascending order, `slots` at once.

    vLLM refills a slot at once: all slots are busy until the last `slots` responses are under way.
    The Hugging Face engine decodes one batch after the other, each to its longest response.
    """
    rounds = -(-len(share) // slots)
    last = share[::-1][::rounds][::-1]
    seconds, before = 0.0, 0
    for ended, length in enumerate(last):
        alive = len(last) - ended
        context = alive * (prompt_tokens + (before + length) / 2)
        seconds += (length - before) * step_seconds(job, alive, context)
        before = length
    if not job.engine.refills:
        return rounds * seconds, rounds * before
    sampled = sum(share)
    full_steps = (len(share) - len(last)) * sampled / len(share) / slots
    context = slots * (prompt_tokens + sum(n * n for n in share) / sampled / 2)
    return seconds + full_steps * step_seconds(job, slots, context), before + full_steps


def step_seconds(job: Job, batch: int, context: float) -> float:
    """A forward pass over one token of each of `batch` sequences that hold `context` tokens
    together, without the factor: of the experts those are read that some token goes to, as if it
    chose evenly.
    """
    shape, hardware, tp = job.shape, job.hardware, job.config.rollout.tp
    head = shape.hidden_size * shape.vocab_size
    met = layer_weights(shape)  # by one token
    read = float(met)
    if moe := shape.moe:
        expert = 3 * shape.hidden_size * moe.ffn_size
        missed = (1 - moe.top_k / moe.num_experts) ** batch
        read += expert * (moe.num_experts * (1 - missed) - moe.top_k)
    weights = (read * shape.num_layers + head) * job.dtype_bytes / tp
    reading = (weights + kv_bytes_per_token(job) * context) / hardware.memory_bandwidth
    gemms = 2.0 * (met * shape.num_layers + head) / tp * batch / hardware.peak_flops
    return max(reading, gemms) + fixed_seconds(job)


def fixed_seconds(job: Job) -> float:
    """Of a decoding step, whatever is read."""
    exchanges = 2 * job.shape.num_layers if job.config.rollout.tp > 1 else 0
    return job.hardware.token_seconds + exchanges * _SMALL_ALL_REDUCE_SECONDS


def verify_seconds(job: Job) -> float:
    """Every rank verifies its part of the finished responses on its cores."""
    limit = job.config.rollout.max_response_tokens
    count = -(-sum(n < limit for n in job.workload.lengths) // job.world_size)
    hardware = job.hardware
    return hardware.verify_factor * count * hardware.verify_seconds / hardware.cpu_cores


def sync_seconds(job: Job) -> float:
    """Updated weights are gathered among those that share the optimizer; then a device receives
    what its engine wants, or sends where that is more. Local copies and checksums read memory,
    which is far faster, and are in the fixed cost.
    """
    hardware = job.hardware
    gathered = max(shared_seconds(job, stage, stage.weight_bytes) for stage in job.stages)
    received, across = sync_bytes(job)
    over_network = received * across / hardware.network_bandwidth
    inside = received * (1 - across) / hardware.link_bandwidth
    seconds = gathered + max(over_network, inside) + hardware.sync_seconds
    return hardware.sync_factor * seconds


def sync_bytes(job: Job) -> tuple[float, float]:
    """(bytes that a device receives; share of them between nodes).

    Of what its engine wants a rank holds about 1 / (tp x pp) itself, of experts 1 / (etp x ep x
    pp); other pipeline stages are on other nodes as soon as one stage fills a node.
    """
    if job.world_size == 1:
        return 0.0, 0.0
    wanted = engine_elements(job) * job.dtype_bytes
    parallel, moe = job.parallel, job.shape.moe
    experts = 3.0 * job.shape.num_layers * job.shape.hidden_size * job.dtype_bytes
    experts *= moe.num_experts * moe.ffn_size / job.config.rollout.tp if moe else 0
    held = (wanted - experts) / (parallel.tp * parallel.pp)
    held += experts / (parallel.expert_tp * parallel.ep * parallel.pp)
    node, across = job.hardware.gpus_per_node, 0.0
    if job.world_size > node:
        fills_nodes = job.world_size // parallel.pp >= node
        across = (parallel.pp - 1) / parallel.pp if fills_nodes else 1 - node / job.world_size
    return wanted - held, across
