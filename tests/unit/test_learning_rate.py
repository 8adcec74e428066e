"""The learning rate as a function of the step alone."""

import pytest

from megatron_opsft.config import OptimizerConfig
from megatron_opsft.model.optimizer import learning_rate


def test_constant_rate_from_the_first_update() -> None:
    config = OptimizerConfig(lr=2e-4)
    assert [learning_rate(step, 10, config) for step in (1, 5, 10)] == [2e-4] * 3


def test_warmup_is_linear_and_reaches_the_rate_at_its_last_step() -> None:
    config = OptimizerConfig(lr=1e-3, warmup_steps=4)
    rates = [learning_rate(step, 10, config) for step in range(1, 7)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


def test_cosine_reaches_the_minimum_at_the_last_step() -> None:
    config = OptimizerConfig(lr=1e-3, min_lr=1e-4, warmup_steps=2, schedule="cosine")
    rates = [learning_rate(step, 12, config) for step in range(1, 13)]
    assert rates[:2] == pytest.approx([0.5e-3, 1e-3])
    assert rates[6] == pytest.approx((1e-3 + 1e-4) / 2)
    assert rates[-1] == pytest.approx(1e-4)
    assert rates[1:] == sorted(rates[1:], reverse=True)


def test_a_run_shorter_than_its_warmup_keeps_warming_up() -> None:
    config = OptimizerConfig(lr=1e-3, warmup_steps=10, schedule="cosine")
    assert learning_rate(5, 5, config) == pytest.approx(0.5e-3)
