"""Advantages of single tokens: the response's, less a price for its divergence from the reference
model (as in the code of ER-RL's authors).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from megatron_opsft.methods.objective import TokenPenalty
from megatron_opsft.records import MicroBatch
from megatron_opsft.runtime.distributed import Layout, join_over_context, sum_over_world

_MIN_VARIANCE = 1e-8


def with_token_penalty(
    updates: Sequence[Sequence[MicroBatch]], penalty: TokenPenalty, layout: Layout
) -> list[list[MicroBatch]]:
    """Replace the advantages of a batch's updates by those that `TokenPenalty` describes.

    updates: the micro-batches of each update; the result is alike. Whitening is over the response
    tokens of all updates and all ranks together; the variance divides by their count. Called by
    every rank; only those of the last pipeline stage have log-probabilities and read advantages.
    """
    penalized = [
        [_penalized(batch, penalty.beta) for batch in batches] for batches in updates
    ]
    if not penalty.whitens:
        return penalized
    advantages: list[Tensor] = []
    if layout.is_loss_rank:
        advantages = list(map(_advantages, chain.from_iterable(penalized)))
    mean, std = _mean_and_std(advantages)
    return [[_whitened(batch, mean, std) for batch in batches] for batches in penalized]


def _penalized(batch: MicroBatch, beta: float) -> MicroBatch:
    """Subtract from each token's advantage `beta` x the divergence from there to the end.

    On other ranks than those of the last stage the batch stays as it is.
    """
    old_R, reference_R = batch.old_log_probs_R, batch.reference_log_probs_R
    if old_R is None or reference_R is None:
        return batch
    indices_R = batch.response_indices_R
    lengths = list(batch.response_lengths)
    divergences = join_over_context((old_R - reference_R).double(), batch)
    # For each response: at every token, the sum of its own divergence and of those after it.
    sums_to_the_end = [
        response.flip(0).cumsum(0).flip(0) for response in divergences.split(lengths)
    ]
    # The empty tensor is for a batch without responses.
    penalties = torch.cat([divergences[:0], *sums_to_the_end])
    if indices_R is not None:
        penalties = penalties[indices_R]
    return replace(batch, advantages_R=(_advantages(batch) - beta * penalties).float())


def _whitened(batch: MicroBatch, mean: float, std: float) -> MicroBatch:
    """Shift and scale the advantages, so that those of all batches have mean 0 and deviation 1."""
    return replace(batch, advantages_R=((_advantages(batch) - mean) / std).float())


def _mean_and_std(advantages: Sequence[Tensor]) -> tuple[float, float]:
    """Return mean and standard deviation over the tokens of all ranks. advantages: this rank's."""
    total, count = sum_over_world(
        [
            math.fsum(float(values.sum()) for values in advantages),
            sum(values.numel() for values in advantages),
        ]
    )
    count = max(count, 1.0)
    mean = total / count
    (squares,) = sum_over_world(
        [math.fsum(float((values - mean).square().sum()) for values in advantages)]
    )
    return mean, math.sqrt(squares / count + _MIN_VARIANCE)


def _advantages(batch: MicroBatch) -> Tensor:
    """Return the advantages of a batch's tokens, float64 [R]."""
    assert batch.advantages_R is not None, (
        "a batch of this objective carries advantages"
    )
    return batch.advantages_R.double()
