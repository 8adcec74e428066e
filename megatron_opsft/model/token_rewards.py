"""A divergence from the reference model as each token's reward, instead of in the loss."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_opsft.methods.objective import Objective
from megatron_opsft.records import MicroBatch
from megatron_opsft.runtime.distributed import Layout, join_over_context, sum_over_world

_FLOOR = 1e-8  # of a variance


def with_token_rewards(
    updates: Sequence[Sequence[MicroBatch]], objective: Objective, layout: Layout
) -> list[list[MicroBatch]]:
    """The micro-batches of a batch's updates, every token's advantage less what the divergence at
    it and behind it costs: A_t = A - beta sum_{s >= t} (log old - log ref)_s. Whitened over all
    tokens of the batch, if the objective says so; the variance divides by the count.

    Called by every rank; the last stage's alone have log-probs, and read advantages.
    """
    beta = objective.reward_beta
    paid = [[_paying(batch, beta) for batch in batches] for batches in updates]
    if not objective.whitens_tokens:
        return paid
    mine = [_values(batch) for batches in paid for batch in batches if layout.is_loss_rank]
    total, count = sum_over_world(
        [sum(float(v.sum()) for v in mine), sum(float(v.numel()) for v in mine)]
    )
    mean = total / max(count, 1.0)
    (squares,) = sum_over_world([sum(float((v - mean).square().sum()) for v in mine)])
    scale = 1 / math.sqrt(squares / max(count, 1.0) + _FLOOR)
    return [
        [replace(b, advantages_R=((_values(b) - mean) * scale).float()) for b in batches]
        for batches in paid
    ]


def _values(batch: MicroBatch) -> Tensor:
    """Advantages, float64 [R]."""
    assert batch.advantages_R is not None, "a batch of this objective carries advantages"
    return batch.advantages_R.double()


def _paying(batch: MicroBatch, beta: float) -> MicroBatch:
    old_R, reference_R = batch.old_log_probs_R, batch.reference_log_probs_R
    if old_R is None or reference_R is None:  # not the last stage
        return batch
    lengths, response_indices_R = list(batch.response_lengths), batch.response_indices_R
    parts = join_over_context(old_R - reference_R, response_indices_R, sum(lengths)).split(lengths)
    to_go = torch.cat([old_R[:0], *(part.flip(0).cumsum(0).flip(0) for part in parts)])
    to_go = to_go if response_indices_R is None else to_go[response_indices_R]
    return replace(batch, advantages_R=(_values(batch) - beta * to_go.double()).float())
