"""The tensors of a micro-batch: whole samples, packed one behind the other (THD).

A context-parallel group cuts every sequence of a pack in 2 x cp equal pieces, of which rank r has
piece r and, counted from the end, piece r again. A causal model works more on a token the later it
is: an early and a late piece together make every rank's work the same. This is the order of
Megatron's and TransformerEngine's attention.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from megatron_opsft.records import MicroBatch, Sample
from megatron_opsft.trainer.batching.packing import (
    PackingReport,
    describe_plan,
    plan_packing,
)


def padded(num_tokens: int, cp_size: int, align: int = 1) -> int:
    """Tokens of a sequence with its padding, so that it can be cut; all of it without a group.

    align: the tensor-parallel size where sequence parallelism cuts each part again.
    """
    if cp_size == 1:
        return num_tokens
    return num_tokens + -num_tokens % (2 * cp_size * align)


def own_pieces(cp_rank: int, cp_size: int) -> tuple[int, int]:
    """Which two pieces a rank has, of 2 x cp_size."""
    return cp_rank, 2 * cp_size - 1 - cp_rank


def own_indices(lengths: Sequence[int], cp_rank: int, cp_size: int) -> Tensor:
    """Which tokens of a pack a rank has: int64 [T / cp_size], ascending.

    lengths: of the sequences, padding included; multiples of 2 x cp_size.
    """
    pieces: list[Tensor] = []
    start = 0
    for length in lengths:
        size = length // (2 * cp_size)
        for piece in own_pieces(cp_rank, cp_size):
            pieces.append(
                torch.arange(start + piece * size, start + (piece + 1) * size)
            )
        start += length
    return torch.cat(pieces)


def joined_order(lengths: Sequence[int], cp_size: int) -> Tensor:
    """int64 [T]: where each token of the pack is, when all ranks' parts follow each other in the
    order of the ranks.
    """
    indices = torch.cat(
        [own_indices(lengths, rank, cp_size) for rank in range(cp_size)]
    )
    return indices.argsort()


Fetch = Callable[[Sequence[Sequence[int]]], Mapping[int, Sample]]
"""For each data-parallel rank the indices of the samples that it packs -> this rank's samples by
index. Called by every rank with the same indices.
"""


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
    """Pack whole samples into one micro-batch, padded to a multiple of `align` tokens; in a
    context-parallel group pad each sequence, and keep this rank's part.

    A response token is predicted at the position before it, so the loss sits on the prompt's last
    position and on all of the response but its last. No sample at all gives `align` tokens of
    padding (or a group's fewest). advantages: of each sample, where the objective asks for them
    apart from the weights.
    """
    tokens: list[int] = []
    positions: list[int] = []
    lengths: list[int] = []
    indices: list[int] = []
    labels: list[int] = []
    for sample in samples:
        first = len(tokens) + len(sample.prompt_ids) - 1
        num_response = len(sample.response_ids)
        indices += range(first, first + num_response)
        labels += sample.response_ids
        tokens += sample.prompt_ids + sample.response_ids
        length = len(sample.prompt_ids) + num_response
        lengths.append(padded(length, cp_size, align))
        tokens += [0] * (lengths[-1] - length)
        positions += range(lengths[-1])
    padding = -len(tokens) % align if tokens else padded(align, cp_size, align)
    if padding:
        tokens += [0] * padding
        positions += range(padding)
        lengths.append(padding)
    responses = tuple(len(sample.response_ids) for sample in samples)
    whole = MicroBatch(
        tokens_T=torch.tensor(tokens, device=device),
        positions_T=torch.tensor(positions, device=device),
        cu_seqlens=_borders(lengths).to(device),
        max_seqlen=max(lengths),
        loss_indices_R=torch.tensor(indices, dtype=torch.int64, device=device),
        labels_R=torch.tensor(labels, dtype=torch.int64, device=device),
        weights_R=_by_token(token_weights, responses, device),
        response_lengths=responses,
        old_log_probs_R=_old_log_probs(samples, device),
        advantages_R=None
        if advantages is None
        else _by_token(advantages, responses, device),
        routing_TW=_routing(samples, lengths),
    )
    if cp_size == 1:
        return whole
    return _part_of(whole, own_indices(lengths, cp_rank, cp_size))


def _borders(lengths: Sequence[int]) -> Tensor:
    """Where each sequence of a pack begins, and where the last one ends; int32."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def _part_of(whole: MicroBatch, indices_T: Tensor) -> MicroBatch:
    """indices_T: int64, ascending: the tokens of the pack that this rank has."""
    indices_T = indices_T.to(whole.tokens_T.device)
    here = torch.full_like(whole.tokens_T, -1)
    here[indices_T] = torch.arange(len(indices_T), device=indices_T.device)
    indices_R = here[whole.loss_indices_R]
    (response_indices_R,) = (indices_R >= 0).nonzero(as_tuple=True)

    def own(values_R: Tensor | None) -> Tensor | None:
        return None if values_R is None else values_R[response_indices_R]

    return replace(
        whole,
        tokens_T=whole.tokens_T[indices_T],
        positions_T=whole.positions_T[indices_T],
        loss_indices_R=indices_R[response_indices_R],
        labels_R=whole.labels_R[response_indices_R],
        weights_R=whole.weights_R[response_indices_R],
        advantages_R=own(whole.advantages_R),
        old_log_probs_R=own(whole.old_log_probs_R),
        response_indices_R=response_indices_R,
        routing_TW=None
        if whole.routing_TW is None
        else whole.routing_TW[indices_T.cpu()],
    )


def _old_log_probs(samples: Sequence[Sample], device: torch.device) -> Tensor | None:
    """float32 [R], where all samples bring theirs."""
    given = [sample.log_probs for sample in samples if sample.log_probs is not None]
    if not samples or len(given) < len(samples):
        return None
    return torch.tensor(
        list(chain.from_iterable(given)), dtype=torch.float32, device=device
    )


def _routing(samples: Sequence[Sample], lengths: Sequence[int]) -> Tensor | None:
    """[T, layers x top_k], where all samples bring theirs; lengths: of the pack's sequences.

    The last token of a sequence and padding, for which nobody chose and whose outputs nobody reads,
    go where the token before them goes.
    """
    if not samples or not all(sample.routing for sample in samples):
        return None
    parts = []
    for sample, length in zip(samples, lengths, strict=False):
        num_chosen = len(sample.prompt_ids) + len(sample.response_ids) - 1
        chosen = torch.frombuffer(bytearray(sample.routing), dtype=torch.uint8)
        rows = torch.arange(length).clamp_(max=num_chosen - 1)
        parts.append(chosen.view(num_chosen, -1)[rows])
    parts += [parts[-1][-1:].expand(length, -1) for length in lengths[len(samples) :]]
    return torch.cat(parts)


def _by_token(
    values: Sequence[float], lengths: Sequence[int], device: torch.device
) -> Tensor:
    """Each response's value at every token of it, float32 [R]."""
    return torch.tensor(values, dtype=torch.float32, device=device).repeat_interleave(
        torch.tensor(lengths, dtype=torch.int64, device=device),
        output_size=sum(lengths),
    )


def pack(
    lengths: Sequence[int],
    token_weights: Sequence[float],
    fetch: Fetch,
    *,
    budget: int,
    dp_rank: int,
    dp_size: int,
    cp_rank: int = 0,
    cp_size: int = 1,
    multiple: int = 1,
    align: int = 1,
    quadratic_at: float = 8192.0,
    device: torch.device,
    advantages: Sequence[float] | None = None,
) -> tuple[list[MicroBatch], list[list[int]], PackingReport]:
    """This rank's micro-batches of the global batch, the indices of the samples in each of them, in
    its order, and how well all ranks' are packed.

    Every rank calls it with the same lengths (tokens of prompt and response) and weights of all
    samples; `fetch` gets the tokens of those that this rank packs. budget: tokens of a rank, so
    that a context-parallel group's packs have cp_size times as many. Whole packs are balanced over
    data-parallel ranks; the parts of one are alike. multiple, quadratic_at: see `plan_packing`;
    align, advantages: see `build_microbatch`. Collective over the world.
    """
    tokens = [padded(length, cp_size, align) for length in lengths]
    budget *= cp_size
    plan = plan_packing(
        tokens,
        budget=budget,
        dp_size=dp_size,
        multiple=multiple,
        quadratic_at=quadratic_at,
    )
    report = describe_plan(tokens, plan, budget=budget, quadratic_at=quadratic_at)
    report = replace(report, num_tokens=sum(lengths))  # without what pads them
    samples = fetch([list(chain.from_iterable(bins)) for bins in plan])
    bins_here = [sorted(indices) for indices in plan[dp_rank]]
    batches = [
        build_microbatch(
            [samples[i] for i in indices],
            [token_weights[i] for i in indices],
            align=align,
            device=device,
            advantages=None if advantages is None else [advantages[i] for i in indices],
            cp_rank=cp_rank,
            cp_size=cp_size,
        )
        for indices in bins_here
    ]
    return batches, bins_here, report
