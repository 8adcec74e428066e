"""How a context-parallel group cuts a pack: every sequence in 2 x cp equal pieces, of which rank r
has piece r and, counted from the end, piece r again.

A causal model works more on a token the later it is: an early and a late piece together make every
rank's work the same. This is the order of Megatron's and TransformerEngine's attention.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


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
            pieces.append(torch.arange(start + piece * size, start + (piece + 1) * size))
        start += length
    return torch.cat(pieces)


def joined_order(lengths: Sequence[int], cp_size: int) -> Tensor:
    """int64 [T]: where each token of the pack is, when all ranks' parts follow each other in the
    order of the ranks.
    """
    indices = torch.cat([own_indices(lengths, rank, cp_size) for rank in range(cp_size)])
    return indices.argsort()
