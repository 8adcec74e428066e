"""Log-probabilities of response tokens under the current weights: passes without a gradient."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_opsft.batching.microbatch import build_microbatch
from megatron_opsft.loss.cross_entropy import Method, summed_loss
from megatron_opsft.loss.fused_linear import token_statistics
from megatron_opsft.loss.output_head import OutputHead, whole_hidden
from megatron_opsft.loss.token_losses import WeightedLikelihood
from megatron_opsft.model.schedule import PassSchedule
from megatron_opsft.records import MicroBatch, Sample
from megatron_opsft.runtime.context import join_over_context
from megatron_opsft.runtime.distributed import Layout, broadcast_over


def _as_in_training(
    method: Method,
    config: TransformerConfig,
    head: OutputHead,
    batch: MicroBatch,
    hidden: Tensor,
    non_loss_data: bool = True,
) -> Tensor:
    """Log-probs [R] of one micro-batch with the rounding of the training step's."""
    hidden_TH = whole_hidden(hidden[0], head.group, sequence_parallel=config.sequence_parallel)
    losses = WeightedLikelihood(batch.weights_R)
    return summed_loss(method, hidden_TH, head, batch.loss_indices_R, batch.labels_R, losses)[1]


def _hidden_states(
    config: TransformerConfig,
    head: OutputHead,
    batch: MicroBatch,
    hidden: Tensor,
    non_loss_data: bool = True,
) -> Tensor:
    """What the output layer gets where one micro-batch predicts response tokens, [R, H]; in the
    CPU's memory, where a whole batch of them has room.
    """
    hidden_TH = whole_hidden(hidden[0], head.group, sequence_parallel=config.sequence_parallel)
    return hidden_TH[batch.loss_indices_R].cpu()


def _in_float32(
    config: TransformerConfig,
    head: OutputHead,
    batch: MicroBatch,
    hidden: Tensor,
    non_loss_data: bool = True,
    *,
    entropy: bool,
) -> Tensor:
    """Of one micro-batch from float32 logits, whatever the training step does, [R]: log-probs, or
    the entropies of the distributions that they are from.
    """
    hidden_TH = whole_hidden(hidden[0], head.group, sequence_parallel=config.sequence_parallel)
    found = token_statistics(hidden_TH, head, batch.loss_indices_R, batch.labels_R, entropy=entropy)
    return found.log_probs_R if found.entropy_R is None else found.entropy_R


@torch.no_grad()
def score_batches(
    schedule: PassSchedule, batches: Sequence[MicroBatch], method: Method, *, temperature: float
) -> list[Tensor]:
    """Log-probs [R] of each micro-batch, float32, on the ranks of the last stage; none elsewhere.

    Called by every rank with equally many micro-batches, packed as for a training step.
    """
    if not batches:
        return []
    return _run(schedule, partial(_as_in_training, method), batches, temperature=temperature)


@torch.no_grad()
def hidden_states(schedule: PassSchedule, batches: Sequence[MicroBatch]) -> list[Tensor]:
    """Hidden states [R, H] at the response tokens of each micro-batch, of the whole pack under
    context parallelism; ranks and batches as for `score_batches`.
    """
    if not batches:
        return []
    found = _run(schedule, _hidden_states, batches, temperature=1.0)
    device = batches[0].labels_R.device
    return [
        states_RH
        if batch.response_indices_R is None
        else join_over_context(
            states_RH.to(device), batch.response_indices_R, sum(batch.response_lengths)
        ).cpu()
        for batch, states_RH in zip(batches, found, strict=False)
    ]


@torch.no_grad()
def score_samples(
    schedule: PassSchedule,
    layout: Layout,
    samples: Sequence[Sample],
    *,
    align: int,
    temperature: float = 1.0,
    entropy: bool = False,
) -> list[tuple[float, ...]]:
    """Log-probs of every response token of each sample under softmax(logits / temperature), or the
    entropy of that distribution at each of them, in nats.

    Called by every rank with the same samples; every data-parallel replica computes them with
    its own weights and returns its own result, on all of its ranks.
    """
    device = next(schedule.chunks[0].parameters()).device
    batch = build_microbatch(
        samples,
        [1.0] * len(samples),
        align=align,
        device=device,
        cp_rank=layout.cp_rank,
        cp_size=layout.cp_size,
    )
    # Interleaved stages want a multiple of their number.
    batches = [batch] * (layout.pp_size if len(schedule.chunks) > 1 else 1)
    of_hidden = partial(_in_float32, entropy=entropy)
    found = _run(schedule, of_hidden, batches, temperature=temperature)
    num_scores = sum(batch.response_lengths)
    flat_R = torch.empty(num_scores, device=device)
    if layout.is_loss_rank:
        flat_R = join_over_context(found[0], batch.response_indices_R, num_scores)
    source = (layout.pp_size - 1) * layout.tp_size
    broadcast_over(flat_R, source, parallel_state.get_model_parallel_group())
    flat, ends = flat_R.tolist(), list(accumulate(batch.response_lengths))
    return [tuple(flat[a:b]) for a, b in zip([0, *ends], ends, strict=False)]


def _run(
    schedule: PassSchedule, of_hidden: object, batches: Sequence[MicroBatch], *, temperature: float
) -> list[Tensor]:
    for chunk in schedule.chunks:
        chunk.eval()
    return schedule.run(
        of_hidden, batches, temperature=temperature, forward_only=True, collect_non_loss_data=True
    )


def with_old_log_probs(
    batches: Sequence[MicroBatch], log_probs: Sequence[Tensor]
) -> list[MicroBatch]:
    """What `score_batches` found before the first update, in the micro-batches; unchanged where it
    found nothing, since only the last stage reads them.
    """
    if not log_probs:
        return list(batches)
    return [
        replace(batch, old_log_probs_R=found)
        for batch, found in zip(batches, log_probs, strict=True)
    ]
