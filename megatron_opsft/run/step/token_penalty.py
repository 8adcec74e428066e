"""Advantages of single tokens: the response's, less what its divergence from the reference model
costs (ER-RL's authors' code).
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_opsft.methods.objective import TokenPenalty
from megatron_opsft.records import MicroBatch
from megatron_opsft.runtime.distributed import Layout, join_over_context, sum_over_world

_FLOOR = 1e-8  # of a variance


def with_token_penalty(
    updates: Sequence[Sequence[MicroBatch]], penalty: TokenPenalty, layout: Layout
) -> list[list[MicroBatch]]:
    """The micro-batches of a batch's updates with the advantages that `TokenPenalty` describes.

    Whitening is over the response tokens of all updates and all ranks together; the variance
    divides by their count. Called by every rank; only those of the last pipeline stage have
    log-probabilities, and only they read advantages.
    """
    penalized = [
        [_penalized(batch, penalty.beta) for batch in pack] for pack in updates
    ]
    if not penalty.whitens:
        return penalized
    mean, std = _mean_and_std(penalized, layout)
    return [[_whitened(batch, mean, std) for batch in pack] for pack in penalized]


def _penalized(batch: MicroBatch, beta: float) -> MicroBatch:
    old_R, reference_R = batch.old_log_probs_R, batch.reference_log_probs_R
    if old_R is None or reference_R is None:  # not the last stage
        return batch
    here_R = batch.response_indices_R
    lengths = list(batch.response_lengths)
    divergences = join_over_context(
        (old_R - reference_R).double(), here_R, sum(lengths)
    )
    sums_to_the_end = [
        response.flip(0).cumsum(0).flip(0) for response in divergences.split(lengths)
    ]
    to_the_end = torch.cat([divergences[:0], *sums_to_the_end])
    if here_R is not None:
        to_the_end = to_the_end[here_R]
    return replace(batch, advantages_R=(_advantages(batch) - beta * to_the_end).float())


def _whitened(batch: MicroBatch, mean: float, std: float) -> MicroBatch:
    return replace(batch, advantages_R=((_advantages(batch) - mean) / std).float())


def _mean_and_std(
    updates: Sequence[Sequence[MicroBatch]], layout: Layout
) -> tuple[float, float]:
    """Mean and standard deviation of the advantages of all ranks' tokens."""
    mine: list[Tensor] = []
    if layout.is_loss_rank:
        mine = [_advantages(batch) for pack in updates for batch in pack]
    total, count = sum_over_world(
        [
            math.fsum(float(values.sum()) for values in mine),
            math.fsum(values.numel() for values in mine),
        ]
    )
    mean = total / max(count, 1.0)
    (squares,) = sum_over_world(
        [math.fsum(float((v - mean).square().sum()) for v in mine)]
    )
    return mean, math.sqrt(squares / max(count, 1.0) + _FLOOR)


def _advantages(batch: MicroBatch) -> Tensor:
    """float64 [R]."""
    assert batch.advantages_R is not None, (
        "a batch of this objective carries advantages"
    )
    return batch.advantages_R.double()
