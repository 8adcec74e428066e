"""One rank on CUDA against the CPU: TransformerEngine's layers and losses, and the float32 path.

What the CPU computes is compared with Hugging Face in tests/gloo.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hf_reference import hf_gradient
from jobs import NUM_ROLLOUTS, OPTIMIZER, Case, build, exported, gradient, train_steps

from megatron_opsft.objective.cross_entropy import token_losses
from megatron_opsft.runtime.device import has_transformer_engine, select_device
from megatron_opsft.runtime.distributed import start_distributed, stop_distributed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = Case(device_name="cuda")
MODELS = ["qwen2", "qwen2_tied", "qwen3", "llama3"]


@pytest.fixture(autouse=True)
def _leave_groups() -> Iterator[None]:
    yield
    stop_distributed()


def gradient_errors(case: Case) -> dict[str, float]:
    """Per tensor |difference| / |expected|, in the 2-norm, against Hugging Face in float32."""
    loss, _, found = gradient(case)
    hf_loss, expected = hf_gradient(case.model, case.num_samples, NUM_ROLLOUTS, case.mode)
    assert found.keys() == expected.keys()
    assert loss == pytest.approx(hf_loss, rel=1e-2 if case.dtype == "bfloat16" else 1e-5)
    return {
        name: float((torch.from_numpy(found[name]) - want).norm() / want.norm())
        for name, want in expected.items()
    }


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_float32_gradient_is_hugging_face_s(model: str, recompute: str) -> None:
    errors = gradient_errors(replace(CUDA, model=model, recompute=recompute))
    assert max(errors.values()) < 1e-4


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_bfloat16_gradient_is_near_hugging_face_s(model: str, recompute: str) -> None:
    errors = gradient_errors(replace(CUDA, model=model, recompute=recompute, dtype="bfloat16"))
    assert max(errors.values()) < 0.1
    assert sorted(errors.values())[len(errors) // 2] < 0.03


def test_three_steps_lower_the_loss_and_change_what_is_exported() -> None:
    case = replace(CUDA, dtype="bfloat16")
    built = build(case)
    before = exported(built)
    results = [train_steps(built, case, range(1))[0] for _ in range(3)]
    assert results[0].loss > results[1].loss > results[2].loss
    after = exported(built)
    assert before.keys() == after.keys()
    largest = max(float((after[name] - before[name]).abs().max()) for name in after)
    assert 0 < largest < 10 * OPTIMIZER.lr


@pytest.mark.parametrize(("vocab_size", "padded"), [(151_936, 152_064), (128, 128)])
def test_fused_cross_entropy_matches_torch(vocab_size: int, padded: int) -> None:
    device = select_device("cuda")
    if not has_transformer_engine(device):
        pytest.skip("needs TransformerEngine")
    start_distributed(device, CUDA.parallel)
    fused: Any = SimpleNamespace(cross_entropy_loss_fusion=True)
    torch.manual_seed(0)
    values = (5 * torch.randn(1, 33, padded, device="cuda")).bfloat16()
    labels = torch.randint(0, vocab_size, (1, 33), device="cuda")
    weights = torch.arange(33, device="cuda") / 33
    ours, theirs = (values.clone().requires_grad_() for _ in range(2))
    losses = token_losses(ours * 1.0, labels, vocab_size, fused)
    expected = F.cross_entropy(theirs[0, :, :vocab_size].float(), labels[0], reduction="none")
    torch.testing.assert_close(losses[0].float(), expected, rtol=1e-4, atol=1e-4)
    (losses[0] * weights).sum().backward()
    (expected * weights).sum().backward()
    assert ours.grad is not None and theirs.grad is not None
    # Both gradients end in bfloat16: half a unit in the last place each.
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-2, atol=1e-6)
    assert not ours.grad[..., vocab_size:].any()
