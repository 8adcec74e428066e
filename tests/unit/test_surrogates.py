"""What the gradient tests of tests/gloo (every surrogate and KL estimator against autograd) do not
reach: a policy that has drifted far, and a clip that is exactly likelihood.
"""

import math

import pytest
import torch
from torch import Tensor

from megatron_opsft.batching.microbatch import build_microbatch
from megatron_opsft.loss import surrogates
from megatron_opsft.loss.token_losses import ObjectiveLosses, WeightedLikelihood, token_losses
from megatron_opsft.methods.objective import (
    LIKELIHOOD,
    Objective,
    TokenClip,
)
from megatron_opsft.records import MicroBatch, Sample

CPU = torch.device("cpu")


def derivative(value: Tensor, log_probs: Tensor) -> list[float]:
    return torch.autograd.grad(value.sum(), log_probs)[0].tolist()


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
