"""Sequences into micro-batches: packed (THD) to a token budget, the same number on every rank.

`plan_packing` is pure and deterministic: every rank computes the whole plan and builds its own
part of it.
"""

import heapq
from collections.abc import Sequence

import torch

from megatron_opsft.objective.normalization import Normalization
from megatron_opsft.records import MicroBatch, Sample

Bin = list[int]

# Attention costs n^2 * d, everything else about 12 n * hidden: at this length the two are equal for
# common shapes. Only the balance between ranks depends on it.
_QUADRATIC_AT = 8192


def sequence_cost(num_tokens: int) -> float:
    """Relative compute of one sequence: linear part plus attention's square."""
    return num_tokens * (1.0 + num_tokens / _QUADRATIC_AT)


def pack_bins(lengths: Sequence[int], budget: int) -> list[Bin]:
    """First-fit-decreasing: indices of `lengths` in bins of at most `budget` tokens.

    A sequence longer than the budget gets a bin of its own.
    """
    bins: list[Bin] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for number, free in enumerate(room):
            if lengths[index] <= free:
                bins[number].append(index)
                room[number] -= lengths[index]
                break
        else:
            bins.append([index])
            room.append(budget - lengths[index])
    return bins


def _spread_bins(lengths: Sequence[int], num_bins: int, budget: int) -> list[Bin] | None:
    """Longest-first into the least loaded of `num_bins` bins; None when one would exceed the
    budget.
    """
    heap = [(0, number) for number in range(num_bins)]
    bins: list[Bin] = [[] for _ in range(num_bins)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, number = heapq.heappop(heap)
        if bins[number] and tokens + lengths[index] > budget:
            return None
        bins[number].append(index)
        heapq.heappush(heap, (tokens + lengths[index], number))
    return bins


def plan_packing(
    lengths: Sequence[int], *, budget: int, dp_size: int, multiple: int = 1
) -> list[list[Bin]]:
    """For each data-parallel rank its bins of indices into `lengths`; equally many for each rank.

    The number per rank is a multiple of `multiple` (interleaved 1F1B needs that of the pipeline
    size); a bin may be empty, which becomes a filler micro-batch. Ranks are balanced by
    `sequence_cost`.
    """
    bins = pack_bins(lengths, budget)
    per_rank = -(-len(bins) // dp_size)
    per_rank = -(-per_rank // multiple) * multiple
    bins = _spread_bins(lengths, per_rank * dp_size, budget) or bins
    cost = [sum(sequence_cost(lengths[i]) for i in indices) for indices in bins]
    ranks: list[list[Bin]] = [[] for _ in range(dp_size)]
    heap = [(0.0, rank) for rank in range(dp_size)]
    for number in sorted(range(len(bins)), key=lambda b: (-cost[b], b)):
        load, rank = heapq.heappop(heap)
        ranks[rank].append(bins[number])
        if len(ranks[rank]) < per_rank:
            heapq.heappush(heap, (load + cost[number], rank))
    for mine in ranks:
        mine.extend([] for _ in range(per_rank - len(mine)))
    return ranks


def build_microbatch(
    samples: Sequence[Sample], token_weights: Sequence[float], *, align: int, device: torch.device
) -> MicroBatch:
    """Pack whole samples into one micro-batch, filled up to a multiple of `align` tokens.

    The label of position t is token t+1 of the same sequence; prompt positions before the last,
    the last token of each sequence and the filler have weight 0. No sample at all gives a filler
    of `align` tokens.
    """
    tokens: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    weights: list[float] = []
    lengths: list[int] = []
    for sample, weight in zip(samples, token_weights, strict=True):
        sequence = (*sample.prompt_ids, *sample.response_ids)
        num_prompt, num_response = len(sample.prompt_ids), len(sample.response_ids)
        tokens += sequence
        labels += (*sequence[1:], 0)
        positions += range(len(sequence))
        weights += [0.0] * (num_prompt - 1) + [weight] * num_response + [0.0]
        lengths.append(len(sequence))
    filler = -len(tokens) % align if tokens else align
    if filler:
        tokens += [0] * filler
        labels += [0] * filler
        positions += range(filler)
        weights += [0.0] * filler
        lengths.append(filler)
    borders = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return MicroBatch(
        tokens_T=torch.tensor(tokens, device=device),
        labels_T=torch.tensor(labels, device=device),
        positions_T=torch.tensor(positions, device=device),
        weights_T=torch.tensor(weights, dtype=torch.float32, device=device),
        cu_seqlens=borders.to(device),
        max_seqlen=max(lengths),
        num_loss_tokens=sum(len(sample.response_ids) for sample in samples),
    )


def pack(
    samples: Sequence[Sample],
    normalization: Normalization,
    *,
    budget: int,
    dp_rank: int,
    dp_size: int,
    multiple: int = 1,
    align: int = 1,
    device: torch.device,
) -> list[MicroBatch]:
    """This rank's micro-batches of the global batch; every rank calls it with the same samples."""
    lengths = [len(sample.prompt_ids) + len(sample.response_ids) for sample in samples]
    plan = plan_packing(lengths, budget=budget, dp_size=dp_size, multiple=multiple)
    weights = normalization.token_weights
    return [
        build_microbatch(
            [samples[i] for i in sorted(indices)],
            [weights[i] for i in sorted(indices)],
            align=align,
            device=device,
        )
        for indices in plan[dp_rank]
    ]
