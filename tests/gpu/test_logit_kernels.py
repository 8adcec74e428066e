"""The operations on a chunk of logits, in Triton against PyTorch.

Without a GPU: TRITON_INTERPRET=1 runs the kernels on CPU tensors, where Triton is installed.
"""

import os

import pytest
import torch
from torch import Tensor

from megatron_opsft.loss import logit_chunks
from megatron_opsft.loss.fused_linear import operations

ON_CPU = INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# Relative error of a value rounded to the nearest bfloat16; the interpreter rounds towards zero
# (and numbers below 2e-38 wrongly).
BFLOAT16 = 1.01 * (2**-7 if INTERPRETED else 2**-8)
pytest.importorskip("triton")

from megatron_opsft.loss import logit_kernels  # noqa: E402

INF, NAN = float("inf"), float("nan")
# Below, at and beyond the blocks of columns; 1 and 0 of either.
SHAPES = [
    *[(5, 97), (1, 4096), (3, 4097), (2, 8192), (2, 9999), (4, 2048), (1, 18992)],
    *[(7, 1), (3, 2), (0, 11), (4, 0), (0, 0)],
]
SCALES = [1.0, 80.0, 1e4]


def chunk(num_rows: int, num_columns: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Logits in [-scale, scale], and labels of which about a third lie outside."""
    torch.manual_seed(num_rows + num_columns)
    logits = scale * (2 * torch.rand(num_rows, num_columns) - 1)
    width = max(num_columns, 1)
    labels = torch.randint(-(width // 2) - 1, width + width // 2 + 1, (num_rows,))
    if num_columns and num_rows:
        labels[-1] = num_columns - 1
    return logits.to(DEVICE), labels.to(DEVICE)


def assert_same_statistics(
    logits: Tensor, labels: Tensor, *, mean: bool = True, scale: float = 1.0
) -> None:
    before = logits.clone()
    found = logit_kernels.row_statistics(logits, labels, mean=mean)
    expected = logit_chunks.row_statistics(logits, labels, mean=mean)
    near = {"rtol": 1e-5, "atol": 2e-6 * scale, "equal_nan": True}
    torch.testing.assert_close(found.lse_C, expected.lse_C, **near)
    torch.testing.assert_close(found.target_C, expected.target_C, rtol=0, atol=0, equal_nan=True)
    assert (found.mean_C is not None) == mean
    if mean:
        torch.testing.assert_close(found.mean_C, expected.mean_C, **near)
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)


def assert_same_gradient(logits: Tensor, labels: Tensor, lse: Tensor, weights: Tensor) -> None:
    operands = labels, lse, weights
    expected = logit_chunks.loss_gradient_(logits.clone(), *operands, torch.float32)
    low = logit_kernels.loss_gradient_(logits.clone(), *operands, torch.bfloat16)
    full = logit_kernels.loss_gradient_(logits, *operands, torch.float32)
    assert full is logits and low.dtype == torch.bfloat16 and low.shape == full.shape
    torch.testing.assert_close(full, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(low.float(), full, rtol=BFLOAT16, atol=2e-38, equal_nan=True)
    assert not full[weights == 0].any() and not low[weights == 0].any()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("mean", [False, True])
def test_statistics_are_pytorch_s(shape: tuple[int, int], scale: float, mean: bool) -> None:
    logits, labels = chunk(*shape, scale)
    assert_same_statistics(logits, labels, mean=mean, scale=scale)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", SCALES)
def test_gradient_is_pytorch_s(shape: tuple[int, int], scale: float) -> None:
    logits, labels = chunk(*shape, scale)
    # As on one of two ranks: the other has some of the probability.
    lse = torch.logaddexp(logits.logsumexp(1), logits.sum(1) / max(shape[1], 1))
    weights = torch.rand(shape[0], device=DEVICE)
    weights[1::2] = 0.0
    assert_same_gradient(logits, labels, lse, weights)


def test_columns_of_a_wider_matrix() -> None:
    wide, labels = chunk(4, 5000)
    before, inner = wide.clone(), wide[:, 7:4507]
    assert_same_statistics(inner, labels)
    assert_same_gradient(inner, labels, inner.logsumexp(1), torch.ones(4, device=DEVICE))
    assert torch.equal(wide[:, :7], before[:, :7]) and torch.equal(wide[:, 4507:], before[:, 4507:])


@pytest.mark.parametrize("weight", [0.0, 1.0])
@pytest.mark.parametrize("num_columns", [5, 9000])
def test_what_is_not_finite_is_as_in_pytorch(weight: float, num_columns: int) -> None:
    logits = torch.zeros(6, num_columns, device=DEVICE)
    logits[0] = -INF
    logits[1, 2], logits[2, 3], logits[3, 1] = INF, NAN, -INF
    logits[4, 0], logits[4, -1] = INF, NAN
    labels = torch.tensor([0, 2, 3, 1, 1, 0], device=DEVICE)
    assert_same_statistics(logits, labels)
    lse, weights = logits.logsumexp(1), torch.full((6,), weight, device=DEVICE)
    assert_same_gradient(logits, labels, lse, weights)


@pytest.mark.skipif(INTERPRETED, reason="9 GB")
def test_chunk_of_more_than_2_to_the_31_logits() -> None:
    num_columns = 2**21 + 3
    logits = torch.zeros(1026, num_columns, device=DEVICE)
    logits[-1, -1] = 20.0
    labels = torch.full((1026,), num_columns - 1, device=DEVICE)
    found = logit_kernels.row_statistics(logits, labels)
    assert found.target_C[-1] == 20.0
    torch.testing.assert_close(found.lse_C[-1], logits[-1].logsumexp(0))
    ones = torch.ones(1026, device=DEVICE)
    gradient = logit_kernels.loss_gradient_(logits, labels, found.lse_C, ones, torch.float32)
    assert abs(gradient[-1].sum()) < 1e-3 and gradient[-1, -1] < -1e-3


@pytest.mark.skipif(INTERPRETED, reason="the interpreter is not chosen for a run")
def test_triton_s_version_on_a_gpu() -> None:
    assert operations(torch.device(DEVICE, 0)) is logit_kernels
