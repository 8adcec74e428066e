"""The operations on a chunk of logits, in PyTorch, against whole-chunk formulas in float64."""

import pytest
import torch
from torch import Tensor

from megatron_opsft.loss import logit_chunks
from megatron_opsft.loss.logit_chunks import loss_gradient_, row_statistics

INF, NAN = float("inf"), float("nan")
SHAPES = [(5, 97), (1, 1000), (7, 1), (0, 11), (4, 0)]
SCALES = [1.0, 1e4]


@pytest.fixture(autouse=True, params=[1, 300, 2**20], ids=lambda size: f"group{size}")
def _group_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_chunks, "_GROUP", request.param)


def chunk(num_rows: int, num_columns: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Logits in [-scale, scale], and labels of which about a third lie outside."""
    torch.manual_seed(num_rows + num_columns)
    logits = scale * (2 * torch.rand(num_rows, num_columns) - 1)
    width = max(num_columns, 1)
    return logits, torch.randint(-(width // 2) - 1, width + width // 2 + 1, (num_rows,))


def expected_statistics(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = logits.double()
    target = [
        wide[row, label].item() if 0 <= label < logits.shape[1] else 0.0
        for row, label in enumerate(labels.tolist())
    ]
    mean = (wide.softmax(1) * wide).sum(1)
    return wide.logsumexp(1), torch.tensor(target, dtype=torch.float64), mean


def expected_gradient(logits: Tensor, labels: Tensor, lse: Tensor, weights: Tensor) -> Tensor:
    gradient = (logits.double() - lse.double()[:, None]).exp()
    for row, label in enumerate(labels.tolist()):
        if 0 <= label < logits.shape[1]:
            gradient[row, label] -= 1
    return gradient * weights.double()[:, None]


def assert_near(found: Tensor | None, expected: Tensor, scale: float = 1.0) -> None:
    assert found is not None and found.dtype == torch.float32
    torch.testing.assert_close(
        found.double(), expected, rtol=1e-5, atol=2e-6 * scale, equal_nan=True
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("with_mean", [False, True])
def test_statistics_match_float64(shape: tuple[int, int], scale: float, with_mean: bool) -> None:
    logits, labels = chunk(*shape, scale)
    before = logits.clone()
    found = row_statistics(logits, labels, mean=with_mean)
    lse, target, mean = expected_statistics(logits, labels)
    assert_near(found.lse_C, lse, scale)
    assert_near(found.target_C, target)
    if with_mean:
        assert_near(found.mean_C, mean, scale)
    else:
        assert found.mean_C is None
    assert torch.equal(logits, before)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", SCALES)
def test_gradient_matches_float64(shape: tuple[int, int], scale: float) -> None:
    logits, labels = chunk(*shape, scale)
    # As on one of two ranks: the other has some of the probability.
    lse = torch.logaddexp(logits.logsumexp(1), logits.sum(1) / max(shape[1], 1))
    weights = torch.rand(shape[0])
    weights[1::2] = 0.0
    expected = expected_gradient(logits, labels, lse, weights)
    low = loss_gradient_(logits.clone(), labels, lse, weights, torch.bfloat16)
    # float32 knows a logit of 1e4 to 5e-4, and so its probability.
    rtol = 1e-5 + 1e-7 * scale
    full = loss_gradient_(logits, labels, lse, weights, torch.float32)
    assert full is logits and low.dtype == torch.bfloat16
    torch.testing.assert_close(full.double(), expected, rtol=rtol, atol=1e-6)
    assert torch.equal(low, full.bfloat16())
    assert not full[1::2].any() and not low[1::2].any()


def test_what_is_not_finite_is_as_in_pytorch() -> None:
    logits = torch.zeros(6, 5)
    logits[0] = -INF
    logits[1, 2], logits[2, 3], logits[3, 1] = INF, NAN, -INF
    logits[4, 0], logits[4, 1] = INF, NAN
    labels = torch.tensor([0, 2, 3, 1, 1, 0])
    found = row_statistics(logits, labels, mean=True)
    lse, target, mean = expected_statistics(logits, labels)
    assert_near(found.lse_C, lse)
    assert_near(found.target_C, target)
    assert_near(found.mean_C, mean)
    expected = expected_gradient(logits, labels, found.lse_C, torch.ones(6))
    gradient = loss_gradient_(logits, labels, found.lse_C, torch.ones(6), torch.float32)
    assert_near(gradient, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_weight_0_are_zeros_whatever_their_logits(dtype: torch.dtype) -> None:
    logits = torch.tensor([[NAN, 1.0], [INF, 0.0], [-INF, -INF], [3.0, 1.0]])
    labels, weights = torch.tensor([0, 0, 1, 0]), torch.tensor([0.0, 0.0, 0.0, 2.0])
    lse = logits.logsumexp(1)
    gradient = loss_gradient_(logits, labels, lse, weights, dtype)
    assert not gradient[:3].any() and gradient[3].all()
