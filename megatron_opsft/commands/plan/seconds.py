"""Seconds of a step's phases, by formula: GEMMs at peak, bytes at the links' bandwidth and fixed
costs, times the phase's factor of the device; pure, no Megatron.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from megatron_opsft.commands.plan.job import Job, Stage
from megatron_opsft.commands.plan.memory import (
    engine_elements,
    kv_bytes_per_token,
    kv_cache_bytes,
    reference_bytes,
)
from megatron_opsft.models.architectures.shape import forward_flops, layer_weights

STEP_PHASES = ("rollout", "verify", "old_logprob", "reference", "train", "sync")
# One all-reduce of a few kilobytes between the ranks of an engine; vLLM's own kernel takes 5-15 us.
_SMALL_ALL_REDUCE_SECONDS = 6e-6
# Bytes that AdamW moves for an element of this rank's part: gradient, main weight and two moments
# read, the last three and the model's weight written.
_OPTIMIZER_BYTES = 30.0
# And for each element of the gradient buffer: zeroed, scaled (read and written), read for its norm.
_GRADIENT_BYTES = 16.0
# Of every rank for each response of the step: its facts and its packing. Measured on one core.
_RESPONSE_SECONDS = 15e-6


def estimate_step(job: Job) -> dict[str, float]:
    """Seconds of a step: of each phase by the names of metrics.jsonl, of the parts that
    `rollout_seconds` and `training_seconds` name, and `total`.
    """
    hardware, limit = job.hardware, job.config.rollout.max_response_tokens
    # Every rank verifies its part of the finished responses on its cores.
    verified = -(-sum(n < limit for n in job.workload.lengths) // job.world_size)
    step = {
        **rollout_seconds(job),
        "verify": hardware.verify_factor
        * verified
        * hardware.verify_seconds
        / hardware.cpu_cores,
        **training_seconds(job),
        "sync": sync_seconds(job),
    }
    return step | {"total": sum(step[phase] for phase in STEP_PHASES)}


def rollout_seconds(job: Job) -> dict[str, float]:
    """Of the busiest engine: rollout is `prefill` and `decode`, with `decode_fixed` in it."""
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
    share = [
        work.lengths[total - 1 - i * total // count] for i in reversed(range(count))
    ]
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
    lengths, in ascending order, `slots` at once. vLLM refills a slot at once: all are busy until
    the last `slots` responses are under way. The Hugging Face engine decodes one batch after the
    other, each to its longest response.
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
    together, without the factor. It reads the weights once, and all keys and values; of the experts
    those that some token goes to, as if it chose evenly.
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


def sync_seconds(job: Job) -> float:
    """Updated weights are gathered among those that share the optimizer; then a device receives
    what its engine wants and it does not hold: it holds about 1 / (tp x pp), of experts 1 / (etp x
    ep x pp), and a stage that fills a node has all others on other nodes. Local copies and
    checksums are in the fixed cost.
    """
    hardware, parallel, moe = job.hardware, job.parallel, job.shape.moe
    gathered = max(
        shared_seconds(job, stage, stage.weight_bytes) for stage in job.stages
    )
    wanted = engine_elements(job) * job.dtype_bytes
    experts = 3.0 * job.shape.num_layers * job.shape.hidden_size * job.dtype_bytes
    experts *= moe.num_experts * moe.ffn_size / job.config.rollout.tp if moe else 0
    received = wanted - (wanted - experts) / (parallel.tp * parallel.pp)
    received -= experts / (parallel.expert_tp * parallel.ep * parallel.pp)
    node, across = hardware.gpus_per_node, 0.0
    if job.world_size > node:
        fills_nodes = job.world_size // parallel.pp >= node
        across = (
            (parallel.pp - 1) / parallel.pp
            if fills_nodes
            else 1 - node / job.world_size
        )
    over_network = received * across / hardware.network_bandwidth
    inside = received * (1 - across) / hardware.link_bandwidth
    seconds = gathered + max(over_network, inside) + hardware.sync_seconds
    return hardware.sync_factor * seconds


def training_seconds(job: Job) -> dict[str, float]:
    """One step on all ranks. train: passes, `exchange` (of gradients, as far as no pass hides it)
    and `update`, of all updates; old_logprob, reference: forward passes of the policy that sampled
    and of the reference model or teacher, whose weights change places with the model's. bubble: the
    share of the passes' time that a rank waits in its pipeline. All 0 with nothing to train on.
    """
    workload, stages, hardware = job.workload, job.stages, job.hardware
    if not workload.trained:
        parts = ("train", "exchange", "update", "bubble", "old_logprob", "reference")
        return dict.fromkeys(parts, 0.0)
    method, count = job.config.method, num_microbatches(job)
    # A replica has its even share of an update's sequences, and the longest one is whole.
    sequences = workload.sequences
    share = max(1 / (job.dp * method.num_updates), max(sequences) / sum(sequences))
    of_all = [
        pass_seconds(
            job, stage, sequences, sum(workload.trained) if stage.has_output else 0
        )
        for stage in stages
    ]
    fixed = count * hardware.microbatch_seconds / 2
    forward, backward = (
        [share * t + fixed for t in one] for one in zip(*of_all, strict=True)
    )
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    passes = pipeline_seconds(job, both, count)
    # The last backward pass hides the reduction of what came before.
    last = [
        one / count if job.parallel.overlap_grad_reduce else 0.0 for one in backward
    ]
    exchange = max(
        max(0.0, shared_seconds(job, stage, stage.gradient_bytes) - hidden)
        for stage, hidden in zip(stages, last, strict=True)
    )
    update = max(
        s.updated_parameters * _OPTIMIZER_BYTES + s.num_parameters * _GRADIENT_BYTES
        for s in stages
    )
    update /= hardware.memory_bandwidth
    factor = hardware.train_factor * method.num_updates
    host = _RESPONSE_SECONDS * max(len(workload.lengths), len(workload.trained))
    score = factor * pipeline_seconds(job, forward, count)
    objective = method.objective(1.0)
    scores_before = method.num_updates > 1 or objective.token_penalty is not None
    # Both models' weights are read and written, twice: on the device, or by way of the host.
    bandwidth = hardware.memory_bandwidth / 2
    if any(reference_bytes(job, stage)[1] for stage in stages):
        bandwidth = hardware.host_bandwidth
    swap = 4 * max(stage.weight_bytes for stage in stages) / bandwidth
    return {
        "train": factor * (passes + exchange + update) + host,
        "exchange": factor * exchange,
        "update": factor * update,
        "bubble": 1 - sum(both) / len(both) / passes,
        "old_logprob": score if scores_before and not method.has_fixed_data else 0.0,
        "reference": score + factor * swap if objective.keeps_frozen_model else 0.0,
    }


def num_microbatches(job: Job) -> int:
    """Of each data-parallel rank in one update, as full as sequences of the mean length make them;
    the interleaved schedule takes a multiple of the stages.
    """
    if not (sequences := job.workload.sequences):
        return 0
    budget = job.config.train.max_tokens_per_microbatch * job.parallel.cp
    at_once = max(1.0, budget * len(sequences) / sum(sequences))
    of_rank = -(-len(sequences) // (job.dp * job.config.method.num_updates))
    multiple = job.parallel.pp if job.parallel.vpp else 1
    return multiple * ceil(of_rank / at_once / multiple)


def pipeline_seconds(job: Job, stages: Sequence[float], count: int) -> float:
    """Of a pipeline whose stages are busy for so long with `count` micro-batches: the slowest sets
    the pace, the others' passes of one micro-batch, or of one chunk where stages are interleaved,
    fill and drain it (Narayanan et al., 2021).
    """
    around = (sum(stages) - max(stages)) / count / (job.parallel.vpp or 1)
    return max(stages) + around


def pass_seconds(
    job: Job, stage: Stage, sequences: Sequence[int], num_loss_tokens: int
) -> tuple[float, float]:
    """(forward, backward) passes of all these sequences through one rank of a stage, beside what a
    micro-batch costs whatever is in it. num_loss_tokens: 0 unless the stage has the output layer.

    A backward pass is two forward passes of GEMMs; recomputation is one more (full), or that of the
    feed-forward parts (selective). Tensor parallelism exchanges hidden states twice a layer and
    pass (Shoeybi et al., 2019), expert parallelism there and back. Context parallelism lets keys
    and values go round, as if no attention hid it. A pipeline hands hidden states on once.
    """
    parallel, layers, num_tokens = job.parallel, stage.num_layers, sum(sequences)
    tp, cp, pp = parallel.tp, parallel.cp, parallel.pp
    shape = replace(job.shape, num_layers=layers)
    rate = job.hardware.peak_flops * tp * cp
    forward = forward_flops(shape, sequences, num_loss_tokens) / rate
    hidden_bytes = num_tokens * shape.hidden_size * job.dtype_bytes / cp
    of_feed_forward = layers * _feed_forward_exchange(job, hidden_bytes)
    exchange = layers * ring_seconds(job, 2 * hidden_bytes, tp, tp) + of_feed_forward
    kv_bytes = (
        2 * num_tokens * shape.num_kv_heads * shape.head_dim * job.dtype_bytes / tp
    )
    round_trip = layers * ring_seconds(job, kv_bytes, cp, tp * cp)
    hand_on = 0.0
    if pp > 1:  # the next stage begins as many ranks away as a stage has
        hand_on = hidden_bytes / job.hardware.bandwidth(job.world_size // pp + 1)
    again = 0.0
    if job.config.train.recompute == "full":
        again = forward_flops(shape, sequences, 0) / rate + exchange + round_trip
    elif job.config.train.recompute == "selective":
        heads = 2 * shape.num_heads + 2 * shape.num_kv_heads
        weights = layer_weights(shape) - shape.hidden_size * shape.head_dim * heads
        again = 2.0 * num_tokens * weights * layers / rate + of_feed_forward
    exchange += round_trip
    # TransformerEngine's attention sends keys and values round again, to get their gradients.
    back = round_trip if job.with_te else 0.0
    return forward + exchange + hand_on, 2 * forward + exchange + back + again + hand_on


def _feed_forward_exchange(job: Job, hidden_bytes: float) -> float:
    """Of one layer. hidden_bytes: of the tokens of a tensor-parallel group."""
    tp, ep, etp = job.parallel.tp, job.parallel.ep, job.parallel.expert_tp
    if job.shape.moe is None:
        return ring_seconds(job, 2 * hidden_bytes, tp, tp)
    # What a rank's own tokens are for all experts.
    chosen = job.shape.moe.top_k * hidden_bytes / tp
    there_and_back = ring_seconds(job, 2 * chosen, ep, ep * etp)
    return there_and_back + ring_seconds(job, 2 * chosen * etp, etp, etp)


def ring_seconds(job: Job, num_bytes: float, size: int, span: int) -> float:
    """A reduce-scatter or all-gather of this many bytes between `size` ranks; an all-reduce is two.
    span: ranks from the first to the last of them, whom one node may hold.
    """
    return num_bytes * (size - 1) / size / job.hardware.bandwidth(span)


def shared_seconds(job: Job, stage: Stage, num_bytes: float) -> float:
    """An exchange of all that a stage's rank holds, between those that share the optimizer."""
    reach = job.world_size // job.parallel.pp  # from the first to the last of them
    experts = num_bytes * stage.expert_parameters / stage.num_parameters
    return ring_seconds(job, num_bytes - experts, job.num_copies, reach) + ring_seconds(
        job, experts, job.num_expert_copies, reach
    )
