"""The learning rate as a function of the step alone; torch's AdamW in place of TE's."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_opsft.config import OptimizerConfig
from megatron_opsft.trainer.model.optimizer import learning_rate, load_optimizer_settings


def rates(steps: int, total: int, **settings: object) -> list[float]:
    config = OptimizerConfig(lr=1e-3, **settings)
    return [learning_rate(step, total, config) for step in range(1, steps + 1)]


def test_constant_after_a_linear_warmup_that_reaches_it_at_its_last_step() -> None:
    assert rates(10, 10) == [1e-3] * 10
    warmed = [0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3]
    assert rates(6, 10, warmup_steps=4) == pytest.approx(warmed)
    short = rates(5, 5, warmup_steps=10, schedule="cosine")  # shorter than its warmup
    assert short[-1] == pytest.approx(0.5e-3)


def test_cosine_reaches_the_minimum_at_the_last_step() -> None:
    found = rates(12, 12, min_lr=1e-4, warmup_steps=2, schedule="cosine")
    assert found[:2] == pytest.approx([0.5e-3, 1e-3])
    assert found[6] == pytest.approx((1e-3 + 1e-4) / 2)
    assert found[-1] == pytest.approx(1e-4)
    assert found[1:] == sorted(found[1:], reverse=True)


def test_settings_of_an_earlier_version_leave_the_update_in_one_pass() -> None:
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))])
    group = adam.param_groups[0]

    def load(settings: dict[str, Any]) -> None:
        group.update(settings["optimizer"]["param_groups"][0])

    optimizer: Any = SimpleNamespace(
        chained_optimizers=[SimpleNamespace(optimizer=adam, load_state_dict=load)]
    )
    earlier = {"lr": 0.5, "fused": None, "foreach": None}
    load_optimizer_settings(optimizer, {"optimizer": {"param_groups": [earlier]}})
    assert (group["lr"], group["fused"], group["foreach"]) == (0.5, True, False)
