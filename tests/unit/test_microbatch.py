"""Micro-batches by hand. That every token is at its place: the gradients of tests/gloo."""

import torch

from megatron_opsft.records import Sample
from megatron_opsft.trainer.batching.microbatch import build_microbatch


def test_microbatch_by_hand() -> None:
    responses = (((1, 2), (3, 4, 5)), ((6,), (7,)))
    samples = [
        Sample(problem_id="a", sample_index=0, prompt_ids=p, response_ids=r) for p, r in responses
    ]
    device = torch.device("cpu")
    batch = build_microbatch(samples, [1.0, 0.5], advantages=[-0.5, 2.0], align=4, device=device)
    assert batch.tokens_T.tolist()[:7] == [1, 2, 3, 4, 5, 6, 7]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 0]
    assert batch.loss_indices_R.tolist() == [1, 2, 3, 5]
    assert batch.labels_R.tolist() == [3, 4, 5, 7]
    assert batch.weights_R.tolist() == [1.0, 1.0, 1.0, 0.5]
    assert batch.advantages_R is not None
    assert batch.advantages_R.tolist() == [-0.5, -0.5, -0.5, 2.0]
    assert batch.response_lengths == (3, 1) and batch.num_loss_tokens == 4
    assert batch.cu_seqlens.tolist() == [0, 5, 7, 8]  # a filler is a sequence of its own
    assert batch.max_seqlen == 5
    assert batch.cu_seqlens.dtype == torch.int32 and batch.weights_R.dtype == torch.float32
