"""Surrogates and KL estimators against closed forms in float64."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from megatron_opsft.batching.microbatch import build_microbatch
from megatron_opsft.loss import surrogates
from megatron_opsft.loss.token_losses import ObjectiveLosses, WeightedLikelihood, token_losses
from megatron_opsft.methods.catalog.er_rl import ErRl
from megatron_opsft.methods.objective import (
    LIKELIHOOD,
    KlEstimator,
    Objective,
    SequenceClip,
    SquaredLogRatio,
    TokenClip,
)
from megatron_opsft.model.token_rewards import with_token_rewards
from megatron_opsft.records import MicroBatch, Sample
from megatron_opsft.runtime.distributed import Layout

CPU = torch.device("cpu")
LAYOUT = Layout(
    rank=0, world_size=1, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, dp_rank=0, dp_size=1
)
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


@pytest.mark.parametrize(("low", "high", "sign"), [(0.2, 0.2, 1), (0.2, 0.2, -1), (0.9, 9.0, 1)])
def test_sequence_clip_is_the_clip_of_the_geometric_mean(
    low: float, high: float, sign: int
) -> None:
    log_probs, old = log_ratios()
    lengths = [3, 1, 4]  # geometric means 0.71, 1 and 2.03
    advantages = torch.tensor([2.0] * 3 + [-0.5] + [0.7] * 4, dtype=torch.float64) * sign
    found = surrogates.sequence_clip(log_probs, old, advantages, lengths, low=low, high=high)
    gradient = derivative(found, log_probs)
    start = 0
    for length in lengths:
        part = slice(start, start := start + length)
        ratio = float((log_probs - old)[part].mean().exp())
        advantage = float(advantages[part][0])
        clipped = min(max(ratio, 1 - low), 1 + high) * advantage
        value = min(ratio * advantage, clipped)
        assert float(found[part].sum()) == pytest.approx(value, abs=1e-12)
        slope = ratio * advantage / length if value == ratio * advantage else 0.0
        assert gradient[part] == pytest.approx([slope] * length, abs=1e-12)


def test_squared_log_ratio_is_kimi_s() -> None:
    log_probs, old = log_ratios()
    lengths, tau = [3, 5], 0.4
    advantages = torch.tensor([2.0] * 3 + [-0.5] * 5, dtype=torch.float64)
    found = surrogates.squared_log_ratio(log_probs, old, advantages, lengths, tau=tau)
    expected, slopes = 0.0, []
    for part, advantage, length in ((slice(0, 3), 2.0, 3), (slice(3, 8), -0.5, 5)):
        log_ratio = float((log_probs - old)[part].sum())
        expected += advantage * float(log_probs[part].sum()) - tau / 2 * log_ratio**2
        slopes += [advantage - tau * log_ratio] * length
    assert float(found.sum()) == pytest.approx(expected, abs=1e-12)
    assert derivative(found, log_probs) == pytest.approx(slopes, abs=1e-12)


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


def test_kl_turns_an_advantage_into_one_plus_beta_times_ratio_minus_one() -> None:
    """DeepSeekMath's gradient of GRPO with k3: A + beta (ref / p - 1), at p = old."""
    batch = batch_of([2, 3], [0.5, -1.5], [0.25, 2.0])
    log_probs = torch.tensor([-1.0, -0.3, -2.0, -0.7, -0.01])
    reference = torch.tensor([-1.5, -0.1, -2.0, -3.0, -0.02])
    objective = Objective(surrogate=TokenClip(), beta=0.04)
    losses = ObjectiveLosses(
        objective=objective, batch=replace(batch, reference_log_probs_R=reference)
    )
    advantages = torch.tensor([0.5, 0.5, -1.5, -1.5, -1.5])
    weights = torch.tensor([0.25, 0.25, 2.0, 2.0, 2.0])
    expected = weights * (advantages + 0.04 * ((reference - log_probs).exp() - 1))
    torch.testing.assert_close(losses.weights(log_probs), expected, rtol=1e-6, atol=0)
    # In parts, as the chunks of a fused loss ask for them.
    parts = [losses.weights(log_probs[part], part) for part in (slice(0, 3), slice(3, 5))]
    assert torch.equal(torch.cat(parts), losses.weights(log_probs))


@pytest.mark.parametrize("surrogate", [TokenClip(), TokenClip(dual=3.0)], ids=str)
def test_on_policy_clip_has_the_weights_of_the_likelihood_bit_for_bit(surrogate: TokenClip) -> None:
    """One update a batch: the ratio is 1, and A and w go through unrounded."""
    batch = batch_of([3, 2], [1.0, 1.0], [1 / 3, 0.7])
    losses = token_losses(Objective(surrogate=surrogate), batch)
    assert isinstance(token_losses(LIKELIHOOD, batch), WeightedLikelihood)
    assert isinstance(losses, ObjectiveLosses)
    assert torch.equal(losses.weights(-torch.rand(5)), batch.weights_R)
    assert [float(value) for value in losses.statistics(-torch.rand(5))] == [0.0, 0.0]


def test_statistics_count_clipped_tokens_and_sum_the_divergence() -> None:
    log_probs, old = (t.detach().float() for t in log_ratios())
    reference = log_probs - 0.5
    cases = [
        # A of both signs: three ratios above 1.3, two below 0.8.
        (TokenClip(low=0.2, high=0.3), [2, 2, 4], [1.0, -1.0, 1.0], 3),
        (TokenClip(low=0.2, high=0.3), [2, 2, 4], [-1.0, 1.0, 0.0], 2),
        # Geometric means 0.63, 0.95, 1.99: the last response's four tokens.
        (SequenceClip(low=0.2, high=0.3), [2, 2, 4], [1.0, -1.0, 1.0], 4),
        (SquaredLogRatio(tau=0.1), [2, 2, 4], [1.0, -1.0, 1.0], 0),
    ]
    for surrogate, lengths, advantages, num_clipped in cases:
        batch = replace(
            batch_of(lengths, advantages, [1.0] * 3),
            old_log_probs_R=old,
            reference_log_probs_R=reference,
        )
        losses = token_losses(Objective(surrogate=surrogate, beta=0.1, kl="k2"), batch)
        clipped, divergence = losses.statistics(log_probs)
        assert (float(clipped), float(divergence)) == (num_clipped, pytest.approx(8 * 0.125))


def test_a_divergence_in_the_rewards_costs_a_token_and_all_before_it() -> None:
    """Two responses, beta 0.5; by hand."""
    batch = replace(
        batch_of([3, 2], [1.0, -1.0], [1.0, 1.0]),
        old_log_probs_R=torch.tensor([-1.0, -2.0, -3.0, -1.0, -1.0]),
        reference_log_probs_R=torch.tensor([-1.5, -1.0, -3.0, -2.0, -0.5]),
    )
    settings = ErRl(beta=0.5, whiten="tokens")
    objective = settings.objective(1.0)
    assert objective.needs_reference and not objective.is_weighted_likelihood
    assert (objective.beta, objective.reward_beta) == (0.0, 0.5)
    plain = replace(objective, whitens_tokens=False)
    ((paid,),) = with_token_rewards([[batch]], plain, LAYOUT)
    # log old - log ref is 0.5, -1, 0 and 1, -0.5; from each token on -0.5, -1, 0 and 0.5, -0.5.
    assert paid.advantages_R is not None
    assert paid.advantages_R.tolist() == [1.25, 1.5, 1.0, -1.25, -0.75]
    unscored = batch_of([3], [1.0], [1.0])  # of a stage without output
    assert with_token_rewards([[unscored]], plain, LAYOUT) == [[unscored]]
