"""What the gradient tests of tests/gloo (every surrogate and KL estimator against autograd) do not
reach: a policy that has drifted far, and a clip that is exactly likelihood.
"""

import math

import pytest
import torch
from objective_cases import ADVANTAGES, losses_with_past

from megatron_opsft.methods.objective import Objective, TokenClip
from megatron_opsft.trainer.loss.token_losses import ObjectiveLosses, kl_estimate


def k3(d: torch.Tensor) -> tuple[list[float], list[float]]:
    """The estimate where log ref - log p is d, and its derivative by log p."""
    log_probs = torch.full_like(d, -50.0).requires_grad_()
    found = kl_estimate("k3", log_probs, d - 50)
    return found.tolist(), torch.autograd.grad(found.sum(), log_probs)[0].tolist()


def test_k3_is_its_formula_where_a_policy_has_drifted_far() -> None:
    d = torch.tensor([-60.0, -20.0, 2.6, 2.9, 10.0, 30.0, 39.9], dtype=torch.float64)
    found, slopes = k3(d)
    assert found == pytest.approx((d.exp() - d - 1).tolist(), rel=1e-12)
    assert slopes == pytest.approx((1 - d.exp()).tolist(), rel=1e-12)


def test_k3_is_finite_in_float32_and_pulls_back_from_any_distance() -> None:
    """Above d = 40 a straight line, whose slope is that of the formula there."""
    found, slopes = k3(torch.tensor([40.0, 41.0, 500.0]))
    slope = math.expm1(40)
    assert found == pytest.approx([slope - 40 + n * slope for n in (0, 1, 460)], rel=1e-6)
    assert slopes == pytest.approx([-slope] * 3, rel=1e-6)
    assert torch.tensor(slope).square().isfinite()  # as in the norm of a gradient


@pytest.mark.parametrize("dual", [None, 3.0])
def test_on_policy_clip_has_the_weights_of_the_likelihood_bit_for_bit(dual: float | None) -> None:
    """One update a batch: the ratio is 1, and A and w go through unrounded."""
    weights, now = torch.rand(6), -torch.rand(6)
    objective = Objective(surrogate=TokenClip(dual=dual))
    losses = losses_with_past(objective, (3, 1, 2), weights, old=now, reference=now)
    assert isinstance(losses, ObjectiveLosses)
    advantages = torch.tensor(ADVANTAGES).repeat_interleave(torch.tensor([3, 1, 2]))
    assert torch.equal(losses.weights(now), weights * advantages)
    assert [float(value) for value in losses.statistics(now)] == [0.0, 0.0]
