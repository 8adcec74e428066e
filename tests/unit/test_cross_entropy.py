"""Token losses against torch's cross-entropy, with and without padding of the vocabulary."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state

from megatron_opsft.objective.cross_entropy import mask_vocabulary_padding, token_losses

NATIVE: Any = SimpleNamespace(cross_entropy_loss_fusion=False, cross_entropy_fusion_impl="native")


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.parametrize(("vocab_size", "padded"), [(100, 128), (128, 128), (1, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradients_match_torch(vocab_size: int, padded: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = (5 * torch.randn(1, 7, padded)).to(dtype)
    labels = torch.randint(0, vocab_size, (1, 7))
    ours = values.clone().requires_grad_()
    losses = token_losses(ours * 1.0, labels, vocab_size, NATIVE)
    assert losses.dtype == torch.float32
    theirs = values.clone().requires_grad_()
    expected = F.cross_entropy(theirs[0, :, :vocab_size].float(), labels[0], reduction="none")
    torch.testing.assert_close(losses[0], expected, rtol=1e-6, atol=1e-6)
    (losses[0] * torch.arange(7)).sum().backward()
    (expected * torch.arange(7)).sum().backward()
    assert ours.grad is not None and theirs.grad is not None
    torch.testing.assert_close(
        ours.grad, theirs.grad, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-6
    )
    assert not ours.grad[..., vocab_size:].any()


@pytest.mark.parametrize(("tp_rank", "valid"), [(0, 64), (1, 36), (2, 0)])
def test_each_rank_masks_its_own_columns(tp_rank: int, valid: int) -> None:
    logits = mask_vocabulary_padding(torch.zeros(1, 2, 64), 100, tp_rank)
    assert (logits[..., :valid] == 0).all()
    assert (logits[..., valid:] == torch.finfo(torch.float32).min).all()
