"""The operations on a chunk of logits, in PyTorch, against whole-chunk formulas in float64."""

import pytest
import torch
from torch import Tensor

from megatron_opsft.trainer.loss import logit_chunks
from megatron_opsft.trainer.loss.logit_chunks import loss_gradient_, row_statistics

INF, NAN = float("inf"), float("nan")
CASES = [((5, 97), 1.0), ((5, 97), 1e4), ((1, 1000), 1e4), ((7, 1), 1.0), ((0, 11), 1.0)]
CASES.append(((4, 0), 1.0))


@pytest.fixture(autouse=True, params=[1, 300, 2**20], ids=lambda size: f"group{size}")
def _group_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_chunks, "_GROUP", request.param)


def chunk(num_rows: int, num_columns: int, scale: float) -> tuple[Tensor, Tensor]:
    """Logits in [-scale, scale], and labels of which about a third lie outside."""
    torch.manual_seed(num_rows + num_columns)
    logits = scale * (2 * torch.rand(num_rows, num_columns) - 1)
    width = max(num_columns, 1)
    return logits, torch.randint(-(width // 2) - 1, width + width // 2 + 1, (num_rows,))


def one_hot(logits: Tensor, labels: Tensor) -> Tensor:
    """1 where a label lies, which is nowhere for one outside."""
    return (torch.arange(logits.shape[1]) == labels[:, None]).double()


def assert_statistics(logits: Tensor, labels: Tensor, scale: float = 1.0) -> Tensor:
    """And the log-sum-exps found."""
    found = row_statistics(logits, labels, mean=True)
    wide = logits.double()
    for own, expected, size in (
        (found.lse_C, wide.logsumexp(1), scale),
        (found.target_C, wide.where(one_hot(logits, labels) > 0, 0).sum(1), 1.0),
        (found.mean_C, (wide.softmax(1) * wide).sum(1), scale),
    ):
        assert own is not None and own.dtype == torch.float32
        limits = {"rtol": 1e-5, "atol": 2e-6 * size}
        torch.testing.assert_close(own.double(), expected, equal_nan=True, **limits)
    return found.lse_C


def expected_gradient(logits: Tensor, labels: Tensor, lse: Tensor, weights: Tensor) -> Tensor:
    probabilities = (logits.double() - lse.double()[:, None]).exp()
    return (probabilities - one_hot(logits, labels)) * weights.double()[:, None]


@pytest.mark.parametrize(("shape", "scale"), CASES)
def test_statistics_match_float64(shape: tuple[int, int], scale: float) -> None:
    logits, labels = chunk(*shape, scale)
    before = logits.clone()
    assert_statistics(logits, labels, scale)
    assert row_statistics(logits, labels).mean_C is None
    assert torch.equal(logits, before)


@pytest.mark.parametrize(("shape", "scale"), CASES)
def test_gradient_matches_float64(shape: tuple[int, int], scale: float) -> None:
    logits, labels = chunk(*shape, scale)
    # As on one of two ranks: the other has some of the probability.
    lse = torch.logaddexp(logits.logsumexp(1), logits.sum(1) / max(shape[1], 1))
    weights = torch.rand(shape[0])
    weights[1::2] = 0.0
    expected = expected_gradient(logits, labels, lse, weights)
    low = loss_gradient_(logits.clone(), labels, lse, weights, torch.bfloat16)
    full = loss_gradient_(logits, labels, lse, weights, torch.float32)
    assert full is logits and low.dtype == torch.bfloat16
    # float32 knows a logit of 1e4 to 5e-4, and so its probability.
    torch.testing.assert_close(full.double(), expected, rtol=1e-5 + 1e-7 * scale, atol=1e-6)
    assert torch.equal(low, full.bfloat16())
    assert not full[1::2].any() and not low[1::2].any()


def test_what_is_not_finite_is_as_in_pytorch() -> None:
    logits = torch.zeros(6, 5)
    logits[0] = -INF
    logits[1, 2], logits[2, 3], logits[3, 1] = INF, NAN, -INF
    logits[4, 0], logits[4, 1] = INF, NAN
    labels, ones = torch.tensor([0, 2, 3, 1, 1, 0]), torch.ones(6)
    lse = assert_statistics(logits, labels)
    expected = expected_gradient(logits, labels, lse, ones)
    found = loss_gradient_(logits, labels, lse, ones, torch.float32).double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_weight_0_are_zeros_whatever_their_logits(dtype: torch.dtype) -> None:
    logits = torch.tensor([[NAN, 1.0], [INF, 0.0], [-INF, -INF], [3.0, 1.0]])
    labels, weights = torch.tensor([0, 0, 1, 0]), torch.tensor([0.0, 0.0, 0.0, 2.0])
    gradient = loss_gradient_(logits, labels, logits.logsumexp(1), weights, dtype)
    assert not gradient[:3].any() and gradient[3].all()
