"""The operations on a chunk of logits, in Triton against PyTorch.

Without a GPU: TRITON_INTERPRET=1 runs the kernels on CPU tensors, where Triton is installed.
"""

import os
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_opsft.trainer.loss import logit_chunks
from megatron_opsft.trainer.loss.fused_linear import operations

ON_CPU = INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# Relative error of a value rounded to the nearest bfloat16; the interpreter rounds towards zero
# (and numbers below 2e-38 wrongly).
BFLOAT16 = 1.01 * (2**-7 if INTERPRETED else 2**-8)
pytest.importorskip("triton")

from megatron_opsft.trainer.loss import logit_kernels  # noqa: E402

INF, NAN = float("inf"), float("nan")
FORWARD = pytest.mark.parametrize("forward", [False, True], ids=["reverse", "forward"])
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


def taught(num_rows: int, num_columns: int, scale: float = 1.0) -> dict[str, Tensor]:
    """A student's and a teacher's logits, and what else their divergence and its gradient take:
    columns of one of two ranks, and rows of which both weights, none or one is 0.
    """
    logits, labels = chunk(num_rows, num_columns, scale)
    teacher = logits.flip(1) * 0.5
    lse, teacher_lse = (
        torch.logaddexp(each.logsumexp(1), each.sum(1) / max(num_columns, 1))
        for each in (logits, teacher)
    )
    weights, teacher_weights = torch.rand(2, num_rows, device=DEVICE) + 0.1
    weights[1::2] = teacher_weights[1::3] = 0.0
    return {
        "logits_CV": logits,
        "teacher_CV": teacher,
        "labels_C": labels,
        "lse_C": lse,
        "teacher_lse_C": teacher_lse,
        "weights_C": weights,
        "teacher_weights_C": teacher_weights,
    }


def divergences(ops: ModuleType, given: dict[str, Tensor], *, forward: bool) -> Tensor:
    names = ("logits_CV", "teacher_CV", "lse_C", "teacher_lse_C")
    found: Tensor = ops.divergences(*(given[name] for name in names), forward=forward)
    return found


def gradient(
    ops: ModuleType,
    given: dict[str, Tensor],
    divergence: Tensor,
    *,
    forward: bool,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The logits are copied to columns of wider matrices, for they are overwritten."""
    copies = {name: F.pad(given[name], (3, 5))[:, 3:-5] for name in ("logits_CV", "teacher_CV")}
    found: Tensor = ops.distillation_gradient_(
        **given | copies, divergence_C=divergence, out_dtype=dtype, forward=forward
    )
    assert found.dtype == dtype and (dtype != torch.float32 or found is copies["logits_CV"])
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", SCALES)
@FORWARD
def test_divergence_and_its_gradient_are_pytorch_s(
    shape: tuple[int, int], scale: float, forward: bool
) -> None:
    given = taught(*shape, scale)
    nothing = (given["weights_C"] == 0) & (given["teacher_weights_C"] == 0)
    given["logits_CV"][nothing], given["teacher_CV"][nothing] = NAN, INF
    found, expected = (
        divergences(ops, given, forward=forward) for ops in (logit_kernels, logit_chunks)
    )
    near = {"rtol": 1e-5, "atol": 2e-6 * scale, "equal_nan": True}
    torch.testing.assert_close(found, expected, **near)
    whole = expected + 0.25  # with the other rank's part
    full = gradient(logit_kernels, given, whole, forward=forward)
    torch.testing.assert_close(
        full, gradient(logit_chunks, given, whole, forward=forward), rtol=1e-5, atol=2e-6 * scale
    )
    low = gradient(logit_kernels, given, whole, forward=forward, dtype=torch.bfloat16)
    torch.testing.assert_close(low.float(), full, rtol=BFLOAT16, atol=2e-38)
    assert not full[nothing].any() and not low[nothing].any()


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
