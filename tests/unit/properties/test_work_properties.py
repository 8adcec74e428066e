"""Packs cut for a context-parallel group: every token once, ranks alike. That each part has its
tokens' labels, weights and places: the gradients of tests/gloo.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_opsft.trainer.batching.microbatch import joined_order, own_indices
from megatron_opsft.trainer.batching.padding import padded


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 3))
def test_a_pack_cut_for_a_context_parallel_group_is_whole_when_joined(
    lengths: list[int], cp_size: int, align: int
) -> None:
    full = [padded(length, cp_size, align) for length in lengths]
    unit = 2 * cp_size * align if cp_size > 1 else 1
    assert full == [-(-length // unit) * unit for length in lengths]
    full = full if cp_size > 1 else [2 * length for length in full]  # one rank has both pieces
    parts = [own_indices(full, rank, cp_size) for rank in range(cp_size)]
    assert len({len(part) for part in parts}) == 1
    assert all(part.diff().gt(0).all() for part in parts)
    joined = torch.cat(parts)[joined_order(full, cp_size)]
    assert joined.tolist() == list(range(sum(full)))
    # Causal attention, counted in pairs of tokens, is the same work for every rank.
    positions = torch.cat([torch.arange(n) for n in full])
    work = [int((positions[part] + 1).sum()) for part in parts]
    assert len(set(work)) == 1
