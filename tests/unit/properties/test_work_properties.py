"""Packs cut for a context-parallel group: every token once, ranks alike."""

from functools import partial
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_opsft.batching.microbatch import build_microbatch, joined_order, own_indices, padded
from megatron_opsft.records import Sample


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


CPU = torch.device("cpu")
SAMPLES = st.lists(
    st.tuples(st.lists(st.integers(1, 99), min_size=1), st.lists(st.integers(1, 99), min_size=1)),
    max_size=5,
)


@given(SAMPLES, st.integers(2, 4), st.integers(1, 2))
def test_the_parts_of_a_micro_batch_are_those_of_the_whole_one(
    texts: list[tuple[list[int], list[int]]], cp_size: int, align: int
) -> None:
    samples = [
        Sample(problem_id="", sample_index=n, prompt_ids=tuple(p), response_ids=tuple(r))
        for n, (p, r) in enumerate(texts)
    ]
    weights = [float(n) for n in range(len(samples))]
    build = partial(build_microbatch, samples, weights, advantages=weights, device=CPU)
    whole = build(align=1)
    parts = [build(align=align, cp_rank=rank, cp_size=cp_size) for rank in range(cp_size)]
    assert len({part.num_tokens for part in parts}) == 1
    for part in parts:
        assert part.response_lengths == whole.response_lengths
        assert int(part.cu_seqlens[-1]) == cp_size * part.num_tokens
        places: Any = part.response_indices_R
        for name in ("labels_R", "weights_R", "advantages_R"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[places])
        # The same token at the same place of its sequence predicts the label.
        for name in ("tokens_T", "positions_T"):
            ours = getattr(part, name)[part.loss_indices_R]
            assert torch.equal(ours, getattr(whole, name)[whole.loss_indices_R[places]])
    everything: Any = [part.response_indices_R for part in parts]
    assert sorted(torch.cat(everything).tolist()) == list(range(whole.num_loss_tokens))
