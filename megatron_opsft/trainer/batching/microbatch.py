"""The tensors of a micro-batch: whole samples, packed one after another (THD).

A context-parallel group of size cp cuts every sequence of a pack into 2 x cp equal pieces. Rank r
gets piece r from the start and piece r from the end. In a causal model later tokens are more work:
an early and a late piece together give every rank the same work. Megatron's and TransformerEngine's
attention expect this order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from megatron_opsft.config.training import ParallelConfig
from megatron_opsft.records import MicroBatch, Sample
from megatron_opsft.runtime.rounding import round_up
from megatron_opsft.trainer.batching.packing import (
    Bin,
    PackingReport,
    describe_plan,
    plan_packing,
)


def padded(num_tokens: int, cp_size: int, align: int = 1) -> int:
    """Return the length of a sequence with the padding that lets a context-parallel group cut it;
    without a group nothing is padded.

    align: the tensor-parallel size if sequence parallelism cuts the tokens of a rank again.
    """
    if cp_size == 1:
        return num_tokens
    return round_up(num_tokens, 2 * cp_size * align)


def own_pieces(cp_rank: int, cp_size: int) -> tuple[int, int]:
    """Return the numbers of a rank's two pieces among the 2 x cp_size pieces of a sequence."""
    return cp_rank, 2 * cp_size - 1 - cp_rank


def own_indices(lengths: Sequence[int], cp_rank: int, cp_size: int) -> Tensor:
    """Return the positions in the pack of a rank's tokens: int64 [T / cp_size], ascending.

    lengths: of the sequences, padding included; multiples of 2 x cp_size.
    """
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
    position and on all of the response but its last. Without samples the micro-batch is padding
    alone: `align` tokens, or the fewest that a group can cut. advantages: one for each sample, if
    the objective needs them apart from the weights.
    """
    lengths = _sequence_lengths(samples, align, cp_size)
    tokens: list[int] = []
    loss_indices: list[int] = []
    labels: list[int] = []
    for sample, length in zip(samples, lengths, strict=False):
        first = len(tokens) + len(sample.prompt_ids) - 1
        loss_indices += range(first, first + len(sample.response_ids))
        labels += sample.response_ids
        sequence = sample.prompt_ids + sample.response_ids
        tokens += sequence
        tokens += [0] * (length - len(sequence))
    tokens += [0] * (sum(lengths) - len(tokens))
    positions = list(chain.from_iterable(range(length) for length in lengths))
    borders = torch.tensor([0, *lengths], dtype=torch.int32)
    response_lengths = tuple(len(sample.response_ids) for sample in samples)
    advantages_R = None
    if advantages is not None:
        advantages_R = _repeat_over_tokens(advantages, response_lengths, device)
    whole = MicroBatch(
        tokens_T=torch.tensor(tokens, device=device),
        positions_T=torch.tensor(positions, device=device),
        cu_seqlens=borders.cumsum(0, dtype=torch.int32).to(device),
        max_seqlen=max(lengths),
        loss_indices_R=torch.tensor(loss_indices, dtype=torch.int64, device=device),
        labels_R=torch.tensor(labels, dtype=torch.int64, device=device),
        weights_R=_repeat_over_tokens(token_weights, response_lengths, device),
        response_lengths=response_lengths,
        old_log_probs_R=_old_log_probs(samples, device),
        advantages_R=advantages_R,
        routing_TW=_routing(samples, lengths),
    )
    if cp_size == 1:
        return whole
    return _select_tokens(whole, own_indices(lengths, cp_rank, cp_size))


def _sequence_lengths(samples: Sequence[Sample], align: int, cp_size: int) -> list[int]:
    """Return the padded lengths of the pack's sequences; a filler at its end is one more."""
    lengths = [
        padded(len(sample.prompt_ids) + len(sample.response_ids), cp_size, align)
        for sample in samples
    ]
    total = sum(lengths)
    filler = -total % align  # up to the next multiple
    if not total:
        filler = padded(align, cp_size, align)
    if filler:
        lengths.append(filler)
    return lengths


def _select_tokens(whole: MicroBatch, indices_T: Tensor) -> MicroBatch:
    """Return a rank's share of a pack.

    indices_T: its tokens, int64, ascending, in the CPU's memory.
    """
    routing_indices_T = indices_T  # routing stays in the CPU's memory
    indices_T = indices_T.to(whole.tokens_T.device)
    new_index = torch.full_like(whole.tokens_T, -1)
    new_index[indices_T] = torch.arange(len(indices_T), device=indices_T.device)
    loss_indices_R = new_index[whole.loss_indices_R]
    (response_indices_R,) = (loss_indices_R >= 0).nonzero(as_tuple=True)

    def select(values: Tensor | None, indices: Tensor) -> Tensor | None:
        return None if values is None else values[indices]

    return replace(
        whole,
        tokens_T=whole.tokens_T[indices_T],
        positions_T=whole.positions_T[indices_T],
        loss_indices_R=loss_indices_R[response_indices_R],
        labels_R=whole.labels_R[response_indices_R],
        weights_R=whole.weights_R[response_indices_R],
        advantages_R=select(whole.advantages_R, response_indices_R),
        old_log_probs_R=select(whole.old_log_probs_R, response_indices_R),
        response_indices_R=response_indices_R,
        routing_TW=select(whole.routing_TW, routing_indices_T),
    )


def _old_log_probs(samples: Sequence[Sample], device: torch.device) -> Tensor | None:
    """Return the sampling log-probabilities, float32 [R]; None unless all samples have theirs."""
    log_probs: list[float] = []
    for sample in samples:
        if sample.log_probs is None:
            return None
        log_probs += sample.log_probs
    if not samples:
        return None
    return torch.tensor(log_probs, dtype=torch.float32, device=device)


def _routing(samples: Sequence[Sample], lengths: Sequence[int]) -> Tensor | None:
    """Return the experts of each token, uint8 [T, layers x top_k]; None unless all samples have a
    routing. lengths: of the pack's sequences, fillers included.

    The engine chose none for the last token of a sequence and for padding, whose outputs nobody
    reads: they go where the token before them goes.
    """
    if not samples or not all(sample.routing for sample in samples):
        return None
    rows_TW: list[Tensor] = []
    for sample, length in zip(samples, lengths, strict=False):
        num_routed = len(sample.prompt_ids) + len(sample.response_ids) - 1
        choices = torch.frombuffer(bytearray(sample.routing), dtype=torch.uint8)
        tokens = torch.arange(length).clamp_(max=num_routed - 1)
        rows_TW.append(choices.view(num_routed, -1)[tokens])
    last_row = rows_TW[-1][-1:]
    for filler_length in lengths[len(samples) :]:
        rows_TW.append(last_row.expand(filler_length, -1))
    return torch.cat(rows_TW)


def _repeat_over_tokens(
    values: Sequence[float], lengths: Sequence[int], device: torch.device
) -> Tensor:
    """Return each response's value once for each of its tokens, float32 [R]."""
    return torch.tensor(values, dtype=torch.float32, device=device).repeat_interleave(
        torch.tensor(lengths, dtype=torch.int64, device=device),
        output_size=sum(lengths),
    )


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
        padded(length, parallel.cp, _alignment(parallel)) for length in lengths
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
    return plan, replace(report, num_tokens=sum(lengths))


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
    token_weights, advantages: of all samples of the global batch, see `build_microbatch`.
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
                align=_alignment(parallel),
                device=device,
                advantages=pack_advantages,
                cp_rank=cp_rank,
                cp_size=parallel.cp,
            )
        )
    return batches


def _alignment(parallel: ParallelConfig) -> int:
    """Return the number of ranks among which sequence parallelism cuts the tokens of a rank."""
    return parallel.tp if parallel.sequence_parallel else 1
