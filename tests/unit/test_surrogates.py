"""Surrogates and KL estimators against closed forms in float64."""

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from megatron_opsft.batching.microbatch import build_microbatch
from megatron_opsft.loss import surrogates
from megatron_opsft.loss.token_losses import ObjectiveLosses, WeightedLikelihood, token_losses
from megatron_opsft.methods.objective import (
    LIKELIHOOD,
    KlEstimator,
    Objective,
    TokenClip,
)
from megatron_opsft.records import MicroBatch, Sample

CPU = torch.device("cpu")
# p / old by hand: below, at and above every border of clip(r, 0.8, 1.3) and of a dual clip of 3.
RATIOS = [0.5, 0.79, 0.9, 1.0, 1.2, 1.31, 2.0, 5.0]


def derivative(value: Tensor, log_probs: Tensor) -> list[float]:
    return torch.autograd.grad(value.sum(), log_probs)[0].tolist()


def log_ratios() -> tuple[Tensor, Tensor]:
    """(log p, log old) with `RATIOS`, float64."""
    old = -torch.arange(1.0, 1 + len(RATIOS), dtype=torch.float64)
    return (old + torch.tensor(RATIOS, dtype=torch.float64).log()).requires_grad_(), old


@pytest.mark.parametrize(
    ("advantage", "dual", "values", "with_gradient"),
    [
        # min(r, clip(r)): cut off above alone.
        (1.0, None, [0.5, 0.79, 0.9, 1.0, 1.2, 1.3, 1.3, 1.3], [1, 1, 1, 1, 1, 0, 0, 0]),
        # min(-r, -clip(r)): cut off below alone, and any ratio above.
        (-1.0, None, [-0.8, -0.8, -0.9, -1.0, -1.2, -1.31, -2.0, -5.0], [0, 0, 1, 1, 1, 1, 1, 1]),
        (-1.0, 3.0, [-0.8, -0.8, -0.9, -1.0, -1.2, -1.31, -2.0, -3.0], [0, 0, 1, 1, 1, 1, 1, 0]),
        (1.0, 3.0, [0.5, 0.79, 0.9, 1.0, 1.2, 1.3, 1.3, 1.3], [1, 1, 1, 1, 1, 0, 0, 0]),
        (0.0, None, [0.0] * 8, [0] * 8),
    ],
)
def test_token_clip_by_hand(
    advantage: float, dual: float | None, values: list[float], with_gradient: list[int]
) -> None:
    log_probs, old = log_ratios()
    advantages = torch.full_like(old, advantage)
    found = surrogates.token_clip(log_probs, old, advantages, low=0.2, high=0.3, dual=dual)
    assert found.tolist() == pytest.approx(values, abs=1e-12)
    # The ratio is its own derivative by log p.
    expected = [advantage * r * has for r, has in zip(RATIOS, with_gradient, strict=True)]
    assert derivative(found, log_probs) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("estimator", get_args(KlEstimator))
def test_kl_estimator_by_hand(estimator: KlEstimator) -> None:
    log_probs = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64).requires_grad_()
    reference = torch.tensor([-2.0, -2.0, -0.2], dtype=torch.float64)
    found = surrogates.kl_estimate(estimator, log_probs, reference)
    d = torch.tensor([-1.0, 0.0, 0.3], dtype=torch.float64)  # log ref - log p
    values, slopes = {
        "k1": (-d, torch.ones(3)),
        "k2": (d * d / 2, -d),
        "k3": (d.exp() - d - 1, 1 - d.exp()),
    }[estimator]
    assert found.tolist() == pytest.approx(values.tolist(), abs=1e-12)
    assert derivative(found, log_probs) == pytest.approx(slopes.tolist(), abs=1e-12)


def test_k3_is_its_formula_where_a_policy_has_drifted_far() -> None:
    d = torch.tensor([-60.0, -20.0, 2.6, 2.9, 10.0, 30.0, 39.9], dtype=torch.float64)
    log_probs = torch.full_like(d, -50.0).requires_grad_()
    found = surrogates.kl_estimate("k3", log_probs, d - 50)
    assert found.tolist() == pytest.approx((d.exp() - d - 1).tolist(), rel=1e-12)
    assert derivative(found, log_probs) == pytest.approx((1 - d.exp()).tolist(), rel=1e-12)


def test_k3_is_finite_in_float32_and_pulls_back_from_any_distance() -> None:
    """Above d = 40 a straight line, whose slope is that of the formula there."""
    log_probs = torch.tensor([-40.0, -41.0, -500.0]).requires_grad_()
    found = surrogates.kl_estimate("k3", log_probs, torch.zeros(3))
    slope = math.expm1(40)
    assert found.tolist() == pytest.approx([slope - 40 + n * slope for n in (0, 1, 460)], rel=1e-6)
    assert derivative(found, log_probs) == pytest.approx([-slope] * 3, rel=1e-6)
    assert torch.tensor(slope).square().isfinite()  # as in the norm of a gradient


def batch_of(lengths: list[int], advantages: list[float], weights: list[float]) -> MicroBatch:
    samples = [
        Sample(problem_id="a", sample_index=n, prompt_ids=(1,), response_ids=(2,) * length)
        for n, length in enumerate(lengths)
    ]
    return build_microbatch(samples, weights, advantages=advantages, align=1, device=CPU)


@pytest.mark.parametrize("surrogate", [TokenClip(), TokenClip(dual=3.0)], ids=str)
def test_on_policy_clip_has_the_weights_of_the_likelihood_bit_for_bit(surrogate: TokenClip) -> None:
    """One update a batch: the ratio is 1, and A and w go through unrounded."""
    batch = batch_of([3, 2], [1.0, 1.0], [1 / 3, 0.7])
    losses = token_losses(Objective(surrogate=surrogate), batch)
    assert isinstance(token_losses(LIKELIHOOD, batch), WeightedLikelihood)
    assert isinstance(losses, ObjectiveLosses)
    assert torch.equal(losses.weights(-torch.rand(5)), batch.weights_R)
    assert [float(value) for value in losses.statistics(-torch.rand(5))] == [0.0, 0.0]
