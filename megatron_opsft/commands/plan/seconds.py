"""Seconds of a step's phases, by formula; pure, no Megatron.

GEMMs run at the device's peak, bytes move at the links' bandwidth, and fixed costs are added; the
sum is multiplied by the phase's factor of the device.
"""

from collections.abc import Sequence
from math import ceil
from operator import add
from typing import NamedTuple

from megatron_opsft.commands.plan.job import PlannedRun
from megatron_opsft.commands.plan.memory import (
    engine_elements,
    kept_state_bytes,
    kv_bytes_per_token,
    kv_cache_bytes,
    offload_bytes,
    reference_bytes,
)
from megatron_opsft.commands.plan.passes import (
    pass_seconds,
    pipeline_seconds,
    shared_seconds,
)
from megatron_opsft.models.architectures.shape import (
    forward_flops,
    state_bytes,
    weights_per_token,
)
from megatron_opsft.runtime.rounding import ceil_div

STEP_PHASES = (
    "rollout",
    "verify",
    "old_logprob",
    "reference",
    "train",
    "sync",
    "offload",
)
# One all-reduce of a few kilobytes between the ranks of an engine; vLLM's own kernel takes 5-15 us.
_SMALL_ALL_REDUCE_SECONDS = 6e-6
# Bytes that AdamW moves for each element that a rank updates: it reads the gradient, the main
# weight and two moments, and writes the last three and the model's weight.
_OPTIMIZER_BYTES = 30.0
# Bytes moved for each element of the gradient buffer: it is zeroed, scaled (read and written), and
# read for its norm.
_GRADIENT_BYTES = 16.0
# Every rank's work for each response of the step: exchange of its facts, packing. Measured on one
# core.
_RESPONSE_SECONDS = 15e-6


class EngineLoad(NamedTuple):
    """The responses that one rollout engine decodes in a step."""

    lengths: list[int]
    """Tokens of its responses, in ascending order."""
    batch_size: int
    """Number of responses that it decodes at once."""


def estimate_step(run: PlannedRun) -> dict[str, float]:
    """Estimate the seconds of a step.

    Keys: the phases as metrics.jsonl names them, the components of `rollout_seconds` and
    `training_seconds`, and `total`.
    """
    hardware, limit = run.hardware, run.rollout.max_response_tokens
    # The ranks share the finished responses, and each verifies its share on its cores.
    num_finished = sum(length < limit for length in run.workload.lengths)
    num_verified = ceil_div(num_finished, run.world_size)
    verify = hardware.verify_factor * num_verified * hardware.verify_seconds
    step = {
        **rollout_seconds(run),
        "verify": verify / hardware.cpu_cores,
        **training_seconds(run),
        "sync": sync_seconds(run),
    }
    step["offload"] = offload_seconds(run, step["sync"])
    step["total"] = sum(step[phase] for phase in STEP_PHASES)
    return step


def rollout_seconds(run: PlannedRun) -> dict[str, float]:
    """Estimate the seconds of the engine with the most work.

    `rollout` is the sum of `prefill` and `decode`; `decode_fixed` is a share of `decode`.
    """
    load = busiest_engine(run)
    if not load.lengths:
        return dict.fromkeys(("rollout", "prefill", "decode", "decode_fixed"), 0.0)
    prompt_tokens, factor = run.workload.prompt_tokens, run.hardware.rollout_factor
    seconds, num_steps = decode_seconds(
        run, load.lengths, prompt_tokens, load.batch_size
    )
    # The responses to a problem share its prompt.
    num_problems = ceil_div(run.config.data.prompts_per_step, run.num_engines)
    flops = forward_flops(run.shape, [prompt_tokens], 1) * num_problems
    prefill = factor * flops / (run.hardware.peak_flops * run.rollout.tp)
    decode = factor * seconds
    return {
        "rollout": prefill + decode,
        "prefill": prefill,
        "decode": decode,
        "decode_fixed": factor * num_steps * fixed_seconds(run),
    }


def busiest_engine(run: PlannedRun) -> EngineLoad:
    """Return the load of the engine with the most responses and the longest one."""
    workload, rollout = run.workload, run.rollout
    total = len(workload.lengths)
    if not total:
        return EngineLoad([], 0)
    batch_size = rollout.batch_size
    if run.engine.refills:
        num_problems = ceil_div(run.config.data.prompts_per_step, run.num_engines)
        count = num_problems * rollout.group_size
        # vLLM delays the responses that its cache has no room for.
        mean_tokens = workload.prompt_tokens + workload.mean_tokens
        sequence_bytes = kv_bytes_per_token(run) * mean_tokens + kept_state_bytes(run)
        num_fitting = int(kv_cache_bytes(run) / sequence_bytes)
        batch_size = max(1, min(batch_size, num_fitting))
    else:  # responses are dealt to engines one by one, not by problem
        count = ceil_div(total, run.num_engines)
    # Every total/count-th response, counted down from the longest of all.
    lengths = [
        workload.lengths[total - 1 - index * total // count]
        for index in reversed(range(count))
    ]
    return EngineLoad(lengths, min(batch_size, count))


def decode_seconds(
    run: PlannedRun, lengths: Sequence[int], prompt_tokens: int, batch_size: int
) -> tuple[float, float]:
    """Estimate how long an engine decodes responses of these lengths, in ascending order.

    Returns seconds, without the device's factor for rollouts, and the number of decoding steps.
    vLLM starts a new response as soon as one ends, so the batch is full until no response is left
    to start. The Hugging Face engine decodes one batch after the other, each until its longest
    response ends.
    """
    num_batches = ceil_div(len(lengths), batch_size)
    # The last responses under way, or a typical batch: every num_batches-th response, from the one
    # that makes the longest the last of them.
    last_batch = lengths[(len(lengths) - 1) % num_batches :: num_batches]
    seconds, decoded = 0.0, 0
    for num_ended, length in enumerate(last_batch):
        num_alive = len(last_batch) - num_ended
        context = num_alive * (prompt_tokens + (decoded + length) / 2)
        seconds += (length - decoded) * step_seconds(run, num_alive, context)
        decoded = length
    if not run.engine.refills:
        return num_batches * seconds, num_batches * decoded
    sampled = sum(lengths)
    num_before_last = len(lengths) - len(last_batch)
    full_steps = num_before_last * sampled / len(lengths) / batch_size
    # The mean position in a response at a random step: long responses are met more often.
    squares = sum(length * length for length in lengths)
    context = batch_size * (prompt_tokens + squares / sampled / 2)
    seconds += full_steps * step_seconds(run, batch_size, context)
    return seconds, decoded + full_steps


def step_seconds(run: PlannedRun, batch_size: int, context: float) -> float:
    """Estimate a decoding step: a forward pass over one token of each of `batch_size` sequences.

    context: tokens that the sequences hold together. The result is without the rollout's factor.
    The pass reads the weights once, and all keys and values; it reads and writes the states of
    gated delta nets. Of the experts it reads those that some token is routed to, with even routing.
    """
    shape, hardware, tp = run.shape, run.hardware, run.rollout.tp
    output_layer = shape.hidden_size * shape.vocab_size
    num_weights = weights_per_token(shape) + output_layer
    weights_read: float = num_weights
    if moe := shape.moe:
        expert = 3 * shape.hidden_size * moe.ffn_size
        missed_share = (1 - moe.top_k / moe.num_experts) ** batch_size
        experts_read = moe.num_experts * (1 - missed_share)
        weights_read += shape.num_layers * expert * (experts_read - moe.top_k)
    weight_bytes = weights_read * run.dtype_bytes / tp
    kv_bytes = kv_bytes_per_token(run) * context
    states = 2 * batch_size * state_bytes(shape, run.dtype_bytes) / tp
    reading = (weight_bytes + kv_bytes + states) / hardware.memory_bandwidth
    gemms = 2.0 * num_weights / tp * batch_size / hardware.peak_flops
    return max(reading, gemms) + fixed_seconds(run)


def fixed_seconds(run: PlannedRun) -> float:
    """Fixed cost of a decoding step, whatever it reads."""
    num_exchanges = 2 * run.shape.num_layers if run.rollout.tp > 1 else 0
    return run.hardware.token_seconds + num_exchanges * _SMALL_ALL_REDUCE_SECONDS


def sync_seconds(run: PlannedRun) -> float:
    """Estimate a weight sync.

    First the ranks that share an optimizer gather the updated weights. Then each device receives
    the weights that its engine needs and it does not hold. It holds about 1 / (tp x pp) of them,
    of the experts 1 / (etp x ep x pp). If a stage fills whole nodes, all other stages are on other
    nodes. Local copies and checksums are in the fixed cost.
    """
    shape, hardware, parallel = run.shape, run.hardware, run.parallel
    gathered = max(
        shared_seconds(run, stage, stage.trained_bytes) for stage in run.stages
    )
    if run.config.lora.rank:
        gathered += _merge_seconds(run)
    needed = engine_elements(run) * run.dtype_bytes
    experts = 0.0
    if moe := shape.moe:
        experts = 3.0 * shape.num_layers * shape.hidden_size * run.dtype_bytes
        experts *= moe.num_experts * moe.ffn_size / run.rollout.tp
    received = needed - (needed - experts) / (parallel.tp * parallel.pp)
    received -= experts / parallel.expert_ranks
    across_nodes = _share_from_other_nodes(run)
    network = received * across_nodes / hardware.network_bandwidth
    inside_node = received * (1 - across_nodes) / hardware.link_bandwidth
    seconds = gathered + max(network, inside_node) + hardware.sync_seconds
    return hardware.sync_factor * seconds


def _merge_seconds(run: PlannedRun) -> float:
    """Seconds to add adapters to weights: for the sync itself, and again for its checksums.

    Each time a float64 sum of every element is written and read, and the weight read and written.
    """
    num_elements = max(stage.num_parameters for stage in run.stages)
    num_bytes = num_elements * (4 * 8 + 2 * run.dtype_bytes)
    return 2 * num_bytes / run.hardware.memory_bandwidth


def offload_seconds(run: PlannedRun, sync: float) -> float:
    """Estimate how long a step waits for the copies of `train.offload`.

    All of a rank's comes back before training, and leaves after it, at the bandwidth to the CPU's
    memory, the optimizer beside a weight sync of `sync` seconds.
    """
    slowest = 0.0
    for stage in run.stages:
        seconds = offload_bytes(run, stage) / run.hardware.host_bandwidth
        hidden = 0.0
        if run.gives_up("optimizer"):
            hidden = min(sync, stage.optimizer_bytes / run.hardware.host_bandwidth)
        slowest = max(slowest, 2 * seconds - hidden)
    return slowest


def _share_from_other_nodes(run: PlannedRun) -> float:
    """Share of the received weights that a device receives from other nodes."""
    pp, gpus_per_node = run.parallel.pp, run.hardware.gpus_per_node
    if run.world_size <= gpus_per_node:
        return 0.0
    if run.world_size // pp >= gpus_per_node:  # a stage fills whole nodes
        return (pp - 1) / pp
    return 1 - gpus_per_node / run.world_size


def training_seconds(run: PlannedRun) -> dict[str, float]:
    """Estimate the training of one step on all ranks; all 0 with nothing to train on.

    `train`: passes, `exchange` (of gradients, as far as no pass hides it) and `update`, over all
    updates. `old_logprob`, `reference`: forward passes of the policy that sampled, and of the
    reference model or teacher, whose weights are swapped with the model's. `bubble`: the share of
    the passes' time that a rank waits in its pipeline.
    """
    workload, hardware = run.workload, run.hardware
    if not workload.trained:
        keys = ("train", "exchange", "update", "bubble", "old_logprob", "reference")
        return dict.fromkeys(keys, 0.0)
    method, count = run.method, num_microbatches(run)
    forwards, backwards = _stage_passes(run, count)
    both_passes = list(map(add, forwards, backwards))
    pipeline = pipeline_seconds(run, both_passes, count)
    exchange = _exchange_seconds(run, backwards, count)
    moved_bytes = max(
        stage.updated_parameters * _OPTIMIZER_BYTES
        + stage.trained_parameters * _GRADIENT_BYTES
        for stage in run.stages
    )
    update = moved_bytes / hardware.memory_bandwidth
    factor = hardware.train_factor * method.num_updates
    host = _RESPONSE_SECONDS * max(len(workload.lengths), len(workload.trained))
    scoring = factor * pipeline_seconds(run, forwards, count)
    objective = method.objective(1.0)
    old_logprob = reference = 0.0
    compares_with_old = method.num_updates > 1 or objective.token_penalty is not None
    if compares_with_old and not method.has_fixed_data:
        old_logprob = scoring
    if objective.keeps_frozen_model:
        reference = scoring + factor * _swap_seconds(run)
    return {
        "train": factor * (pipeline + exchange + update) + host,
        "exchange": factor * exchange,
        "update": factor * update,
        "bubble": 1 - sum(both_passes) / len(both_passes) / pipeline,
        "old_logprob": old_logprob,
        "reference": reference,
    }


def _stage_passes(run: PlannedRun, count: int) -> tuple[list[float], list[float]]:
    """Seconds of the forward and of the backward passes of each stage in one update.

    count: micro-batches of the update.
    """
    # A replica has its even share of an update's sequences, and the longest one is whole.
    sequences = run.workload.sequences
    even_share = 1 / (run.dp * run.method.num_updates)
    share = max(even_share, max(sequences) / sum(sequences))
    fixed = count * run.hardware.microbatch_seconds / 2
    forwards, backwards = [], []
    for stage in run.stages:
        num_loss_tokens = sum(run.workload.trained) if stage.has_output else 0
        forward, backward = pass_seconds(run, stage, sequences, num_loss_tokens)
        forwards.append(share * forward + fixed)
        backwards.append(share * backward + fixed)
    return forwards, backwards


def _exchange_seconds(run: PlannedRun, backwards: Sequence[float], count: int) -> float:
    """Seconds of the exchange of gradients that no pass hides, on the slowest stage.

    backwards: seconds of each stage's backward passes of `count` micro-batches.
    """
    seconds = 0.0
    for stage, backward in zip(run.stages, backwards, strict=True):
        exchange = shared_seconds(run, stage, stage.gradient_bytes)
        if run.parallel.overlap_grad_reduce:
            # The last backward pass hides the reduction of the earlier ones.
            exchange -= backward / count
        seconds = max(seconds, exchange)
    return seconds


def _swap_seconds(run: PlannedRun) -> float:
    """Seconds to swap the frozen model's weights with the model's and back again."""
    bandwidth = run.hardware.memory_bandwidth / 2  # both models are read and written
    if any(reference_bytes(run, stage).host for stage in run.stages):
        bandwidth = run.hardware.host_bandwidth
    return 4 * max(stage.trained_bytes for stage in run.stages) / bandwidth


def num_microbatches(run: PlannedRun) -> int:
    """Number of micro-batches of each data-parallel rank in one update.

    They are as full as sequences of the mean length make them. The interleaved schedule takes a
    multiple of the number of stages.
    """
    sequences = run.workload.sequences
    if not sequences:
        return 0
    budget = run.train.max_tokens_per_microbatch * run.parallel.cp
    per_microbatch = max(1.0, budget * len(sequences) / sum(sequences))
    per_rank = ceil_div(len(sequences), run.dp * run.method.num_updates)
    multiple = run.parallel.pp if run.parallel.vpp else 1
    return multiple * ceil(per_rank / per_microbatch / multiple)
