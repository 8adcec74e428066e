"""Seconds of the training phase, by formula: GEMMs at peak, bytes at the links' bandwidth, and
the bubble of the pipeline; pure, no Megatron. All of it without `train_factor`, which is applied
once, in `training_seconds`.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from megatron_opsft.architectures.shape import forward_flops, layer_weights
from megatron_opsft.plan.job import Job, Stage
from megatron_opsft.plan.memory import reference_bytes

# Bytes that AdamW moves for an element of this rank's part: gradient, main weight and two moments
# read, the last three and the model's weight written.
_OPTIMIZER_BYTES = 30.0
# And for each element of the gradient buffer: zeroed, scaled (read and written), read for its norm.
_GRADIENT_BYTES = 16.0
# Of every rank for each response of the step: its facts, and its place in the packing. Measured on
# one core.
_RESPONSE_SECONDS = 15e-6


def training_seconds(job: Job) -> dict[str, float]:
    """One step on all ranks. train: passes, `exchange` (of gradients, as far as no pass hides it)
    and `update`, of all updates; old_logprob, reference: passes of the policy that sampled and of
    the reference model, where the method asks for them; of a teacher, with the GEMM that the loss
    makes of its hidden states. bubble: no seconds, but the share of the
    passes' time that a rank waits in its pipeline. Nothing to train on takes no time.
    """
    workload, stages, hardware = job.workload, job.stages, job.hardware
    if not workload.trained:
        return dict.fromkeys(
            ("train", "exchange", "update", "bubble", "old_logprob", "reference"), 0.0
        )
    method, count = job.config.method, num_microbatches(job)
    # A replica has its even share of an update's sequences, and the longest one is whole.
    sequences = workload.sequences
    share = max(1 / (job.dp * method.num_updates), max(sequences) / sum(sequences))
    of_all = [
        pass_seconds(job, stage, sequences, sum(workload.trained) if stage.has_output else 0)
        for stage in stages
    ]
    fixed = count * hardware.microbatch_seconds / 2
    forward = [share * one + fixed for one, _ in of_all]
    backward = [share * one + fixed for _, one in of_all]
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    passes = pipeline_seconds(job, both, count)
    # The last backward pass hides the reduction of what came before.
    last = [one / count if job.parallel.overlap_grad_reduce else 0.0 for one in backward]
    exchange = max(
        max(0.0, shared_seconds(job, stage, stage.gradient_bytes) - hidden)
        for stage, hidden in zip(stages, last, strict=True)
    )
    update = max(optimizer_seconds(job, stage) for stage in stages)
    factor = hardware.train_factor * method.num_updates
    host = _RESPONSE_SECONDS * max(len(workload.lengths), len(workload.trained))
    score = factor * pipeline_seconds(job, forward, count)
    objective = method.objective(1.0)
    scores_before = method.num_updates > 1 or objective.reward_beta > 0
    return {
        "train": factor * (passes + exchange + update) + host,
        "exchange": factor * exchange,
        "update": factor * update,
        "bubble": 1 - sum(both) / len(both) / passes,
        "old_logprob": score if scores_before and not method.has_fixed_data else 0.0,
        "reference": score + factor * _swap_seconds(job) if objective.keeps_frozen_model else 0.0,
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
    """Until a pipeline is through, whose stages are busy for so long with `count` micro-batches:
    the slowest stage sets the pace, and the others' passes of one micro-batch fill and drain it;
    of one chunk's where stages are interleaved (Narayanan et al., 2021).
    """
    around = (sum(stages) - max(stages)) / count / (job.parallel.vpp or 1)
    return max(stages) + around


def pass_seconds(
    job: Job, stage: Stage, sequences: Sequence[int], num_loss_tokens: int
) -> tuple[float, float]:
    """(forward, backward) passes of all these sequences through one rank of a stage, beside what a
    micro-batch costs whatever is in it.

    num_loss_tokens: 0 unless the stage has the output layer. A backward pass is two forward passes
    of GEMMs, and recomputation one more (full), or that of the feed-forward parts (selective).
    Tensor parallelism exchanges the hidden states twice a layer and pass, ring algorithm:
    2 (n - 1) / n of their bytes (Shoeybi et al., 2019); experts those of every expert that a token
    goes to, and expert parallelism sends these there and back. Context parallelism lets keys and
    values go round, backward with their gradients; as if no attention hid it. A pipeline hands
    hidden states on once.
    """
    parallel, layers, num_tokens = job.parallel, stage.num_layers, sum(sequences)
    tp, cp, pp = parallel.tp, parallel.cp, parallel.pp
    shape = replace(job.shape, num_layers=layers)
    rate = job.hardware.peak_flops * tp * cp
    forward = forward_flops(shape, sequences, num_loss_tokens) / rate
    hidden_bytes = num_tokens * shape.hidden_size * job.dtype_bytes / cp
    of_feed_forward = layers * _feed_forward_exchange(job, hidden_bytes)
    exchange = layers * ring_seconds(job, 2 * hidden_bytes, tp, tp) + of_feed_forward
    kv_bytes = 2 * num_tokens * shape.num_kv_heads * shape.head_dim * job.dtype_bytes / tp
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
    parallel, moe = job.parallel, job.shape.moe
    tp, ep, etp = parallel.tp, parallel.ep, parallel.expert_tp
    if moe is None:
        return ring_seconds(job, 2 * hidden_bytes, tp, tp)
    chosen = moe.top_k * hidden_bytes / tp  # what a rank's own tokens are, for all experts
    there_and_back = ring_seconds(job, 2 * chosen, ep, ep * etp)
    return there_and_back + ring_seconds(job, 2 * chosen * etp, etp, etp)


def ring_seconds(job: Job, num_bytes: float, size: int, span: int) -> float:
    """A reduce-scatter or all-gather of so many bytes between `size` ranks; an all-reduce is two.

    span: ranks between the first and the last of them, which decides whether a node holds them all.
    """
    return num_bytes * (size - 1) / size / job.hardware.bandwidth(span)


def shared_seconds(job: Job, stage: Stage, num_bytes: float) -> float:
    """An exchange of all that a stage's rank holds, between those that share the optimizer."""
    reach = job.world_size // job.parallel.pp  # from the first to the last of them
    experts = num_bytes * stage.expert_parameters / stage.num_parameters
    return ring_seconds(job, num_bytes - experts, job.num_copies, reach) + ring_seconds(
        job, experts, job.num_expert_copies, reach
    )


def optimizer_seconds(job: Job, stage: Stage) -> float:
    """The update of a rank's part, and what the whole gradient buffer goes through around it."""
    moved = stage.updated_parameters * _OPTIMIZER_BYTES + stage.num_parameters * _GRADIENT_BYTES
    return moved / job.hardware.memory_bandwidth


def _swap_seconds(job: Job) -> float:
    """The reference model's weights change places with the model's, and back."""
    # Both are read and both are written, twice: on the device, or on the way to the host and back.
    bandwidth = job.hardware.memory_bandwidth / 2
    if any(reference_bytes(job, stage)[1] for stage in job.stages):
        bandwidth = job.hardware.host_bandwidth
    return 4 * max(stage.weight_bytes for stage in job.stages) / bandwidth
