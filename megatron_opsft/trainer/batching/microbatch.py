"""The tensors of a micro-batch: whole samples, packed one after another (THD).

A context-parallel group of size cp cuts every sequence of a pack into 2 x cp equal pieces. Rank r
gets piece r from the start and piece r from the end. In a causal model later tokens are more work:
an early and a late piece together give every rank the same work. Megatron's and TransformerEngine's
attention expect this order.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from megatron_opsft.config.training import ParallelConfig
from megatron_opsft.records import MicroBatch, Sample
from megatron_opsft.trainer.batching.packing import (
    Bin,
    PackingReport,
    describe_plan,
    plan_packing,
)
from megatron_opsft.trainer.batching.padding import padded


def own_pieces(cp_rank: int, cp_size: int) -> tuple[int, int]:
    """Return the numbers of a rank's two pieces among the 2 x cp_size pieces of a sequence."""
    return cp_rank, 2 * cp_size - 1 - cp_rank


def own_indices(lengths: Sequence[int], cp_rank: int, cp_size: int) -> Tensor:
    """Return the positions in the pack of a rank's tokens: int64 [T / cp_size], ascending.

    lengths: tokens of each sequence, padding included; multiples of 2 x cp_size in a group.
    """
    if cp_size == 1:
        return torch.arange(sum(lengths))
    pieces: list[Tensor] = []
    start = 0
    for length in lengths:
        size = length // (2 * cp_size)
        for number in own_pieces(cp_rank, cp_size):
            first = start + number * size
            pieces.append(torch.arange(first, first + size))
        start += length
    return torch.cat(pieces)


def joined_order(lengths: Sequence[int], cp_size: int) -> Tensor:
    """Return the index that puts the tokens of all ranks back into the order of the pack, int64
    [T]: indexing the ranks' tokens, concatenated in the order of ranks, with it gives the pack.
    """
    indices = [own_indices(lengths, rank, cp_size) for rank in range(cp_size)]
    return torch.cat(indices).argsort()


def build_microbatch(
    samples: Sequence[Sample],
    token_weights: Sequence[float],
    *,
    align: int,
    device: torch.device,
    advantages: Sequence[float] | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
) -> MicroBatch:
    """Pack whole samples into one micro-batch, padded to a multiple of `align` tokens. In a
    context-parallel group pad each sequence instead, and keep only this rank's tokens.

    A response token is predicted at the position before it, so the loss sits on the prompt's last
    position and on all of the response but its last. advantages: one for each sample, if the
    objective needs them apart from the weights.
    """
    lengths = _sequence_lengths(samples, align, cp_size)
    borders = list(accumulate(lengths, initial=0))
    tokens = [0] * sum(lengths)
    loss_indices: list[int] = []
    for sample, start in zip(samples, borders, strict=False):
        end = start + sample.sequence_tokens
        tokens[start:end] = sample.prompt_ids + sample.response_ids
        loss_indices += range(end - len(sample.response_ids) - 1, end - 1)
    tokens_T = torch.tensor(tokens)
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    # This rank's tokens, by their position in the pack, and this rank's response tokens, by their
    # number among those of the pack; all of them without a group.
    own_T = own_indices(lengths, cp_rank, cp_size)
    loss_positions = torch.tensor(loss_indices, dtype=torch.int64)
    (own_R,) = torch.isin(loss_positions, own_T).nonzero(as_tuple=True)
    loss_positions_R = loss_positions[own_R]

    def of_responses(values: Sequence[float]) -> Tensor:
        """Return this rank's part of values, one for each response token of the pack."""
        return torch.tensor(values, dtype=torch.float32)[own_R].to(device)

    advantages_R = old_log_probs_R = routing_TW = None
    if advantages is not None:
        advantages_R = of_responses(_repeat_over_tokens(advantages, samples))
    if (log_probs := _old_log_probs(samples)) is not None:
        old_log_probs_R = of_responses(log_probs)
    if samples and all(sample.routing for sample in samples):
        routing_TW = _routing(samples, lengths)[own_T]
    return MicroBatch(
        tokens_T=tokens_T[own_T].to(device),
        positions_T=positions_T[own_T].to(device),
        cu_seqlens=torch.tensor(borders, dtype=torch.int32, device=device),
        max_seqlen=max(lengths),
        loss_indices_R=torch.searchsorted(own_T, loss_positions_R).to(device),
        labels_R=tokens_T[loss_positions_R + 1].to(device),
        weights_R=of_responses(_repeat_over_tokens(token_weights, samples)),
        response_lengths=tuple(len(sample.response_ids) for sample in samples),
        old_log_probs_R=old_log_probs_R,
        advantages_R=advantages_R,
        response_indices_R=own_R.to(device) if cp_size > 1 else None,
        routing_TW=routing_TW,
    )


def _sequence_lengths(samples: Sequence[Sample], align: int, cp_size: int) -> list[int]:
    """Return the padded lengths of the pack's sequences; a filler at its end is one more. Without
    samples there is a filler alone: `align` tokens, or the fewest that a group can cut.
    """
    lengths = [padded(sample.sequence_tokens, cp_size, align) for sample in samples]
    total = sum(lengths)
    filler = -total % align  # up to the next multiple
    if not total:
        filler = padded(align, cp_size, align)
    if filler:
        lengths.append(filler)
    return lengths


def _old_log_probs(samples: Sequence[Sample]) -> list[float] | None:
    """Return the sampling log-probabilities of all tokens; None unless all samples have theirs."""
    log_probs: list[float] = []
    for sample in samples:
        if sample.log_probs is None:
            return None
        log_probs += sample.log_probs
    return log_probs if samples else None


def _routing(samples: Sequence[Sample], lengths: Sequence[int]) -> Tensor:
    """Return the experts of each token, uint8 [T, layers x top_k]. lengths: tokens of
    each of the pack's sequences, a filler included.

    The engine chose none for the last token of a sequence and for padding, whose outputs nobody
    reads: they go where the token before them goes.
    """
    rows_TW: list[Tensor] = []
    for sample, length in zip(samples, lengths, strict=False):
        num_routed = sample.sequence_tokens - 1
        choices = torch.frombuffer(bytearray(sample.routing), dtype=torch.uint8)
        tokens = torch.arange(length).clamp_(max=num_routed - 1)
        rows_TW.append(choices.view(num_routed, -1)[tokens])
    filler = sum(lengths[len(samples) :])
    return torch.cat([*rows_TW, rows_TW[-1][-1:].expand(filler, -1)])


def _repeat_over_tokens(
    values: Sequence[float], samples: Sequence[Sample]
) -> list[float]:
    """Return each response's value once for each of its tokens."""
    repeated: list[float] = []
    for value, sample in zip(values, samples, strict=True):
        repeated += [value] * len(sample.response_ids)
    return repeated


def plan_packs(
    lengths: Sequence[int],
    parallel: ParallelConfig,
    *,
    budget: int,
    dp_size: int,
    quadratic_at: float = 8192.0,
) -> tuple[list[list[Bin]], PackingReport]:
    """Plan the packs of the global batch: for each data-parallel rank the indices of the samples in
    each of its packs, ascending, and a report on all of them. Every rank makes the same plan.

    Whole packs are balanced over data-parallel ranks; the ranks of a context-parallel group get
    equal shares of one. lengths: tokens of prompt and response of every sample. budget: tokens of
    one rank, so the packs of a context-parallel group have parallel.cp times as many.
    quadratic_at: see `plan_packing`.
    """
    padded_lengths = [
        padded(length, parallel.cp, parallel.sequence_shards) for length in lengths
    ]
    budget *= parallel.cp
    plan = plan_packing(
        padded_lengths,
        budget=budget,
        dp_size=dp_size,
        multiple=parallel.pp if parallel.vpp else 1,
        quadratic_at=quadratic_at,
    )
    report = describe_plan(
        padded_lengths, plan, budget=budget, quadratic_at=quadratic_at
    )
    for indices in chain.from_iterable(plan):
        indices.sort()
    # Padding does not count.
    return plan, report._replace(num_tokens=sum(lengths))


def pack(
    packs: Sequence[Sequence[int]],
    samples: Mapping[int, Sample],
    token_weights: Sequence[float],
    parallel: ParallelConfig,
    *,
    device: torch.device,
    advantages: Sequence[float] | None = None,
    cp_rank: int = 0,
) -> list[MicroBatch]:
    """Return the micro-batches of a rank.

    packs: the indices of the samples in each of them, see `plan_packs`. samples: by index.
    token_weights, advantages: one for each sample of the global batch, see `build_microbatch`.
    """
    batches = []
    for indices in packs:
        pack_advantages = None
        if advantages is not None:
            pack_advantages = [advantages[index] for index in indices]
        batches.append(
            build_microbatch(
                [samples[index] for index in indices],
                [token_weights[index] for index in indices],
                align=parallel.sequence_shards,
                device=device,
                advantages=pack_advantages,
                cp_rank=cp_rank,
                cp_size=parallel.cp,
            )
        )
    return batches
