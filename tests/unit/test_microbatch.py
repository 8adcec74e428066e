"""Micro-batches: every token at its place, and weight on responses alone."""

import torch

from megatron_opsft.batching.microbatch import build_microbatch
from megatron_opsft.records import Sample

CPU = torch.device("cpu")


def sample(prompt: tuple[int, ...], response: tuple[int, ...], index: int = 0) -> Sample:
    return Sample(problem_id="a", sample_index=index, prompt_ids=prompt, response_ids=response)


def test_microbatch_by_hand() -> None:
    batch = build_microbatch(
        [sample((1, 2), (3, 4, 5)), sample((6,), (7,))],
        [1.0, 0.5],
        advantages=[-0.5, 2.0],
        align=1,
        device=CPU,
    )
    assert batch.tokens_T.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert batch.loss_indices_R.tolist() == [1, 2, 3, 5]
    assert batch.labels_R.tolist() == [3, 4, 5, 7]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert batch.weights_R.tolist() == [1.0, 1.0, 1.0, 0.5]
    assert batch.advantages_R is not None
    assert batch.advantages_R.tolist() == [-0.5, -0.5, -0.5, 2.0]
    assert batch.response_lengths == (3, 1)
    assert batch.cu_seqlens.tolist() == [0, 5, 7]
    assert batch.max_seqlen == 5
    assert batch.num_loss_tokens == 4
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.weights_R.dtype == torch.float32


def test_filler_is_a_sequence_of_its_own_without_weight() -> None:
    batch = build_microbatch([sample((1, 2), (3, 4, 5))], [1.0], align=4, device=CPU)
    assert batch.tokens_T.numel() == 8 and batch.cu_seqlens.tolist() == [0, 5, 8]
    assert batch.loss_indices_R.tolist() == [1, 2, 3]


def test_empty_microbatch_has_no_weight_and_some_tokens() -> None:
    batch = build_microbatch([], [], advantages=[], align=4, device=CPU)
    assert batch.tokens_T.numel() == 4
    assert batch.num_loss_tokens == 0
    assert batch.loss_indices_R.dtype == batch.labels_R.dtype == torch.int64
    assert batch.advantages_R is not None and batch.advantages_R.numel() == 0
    assert batch.response_lengths == ()
