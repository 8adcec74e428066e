"""The response lengths that a plan assumes."""

import pytest
from plan_cases import LARGE, make_job

from megatron_opsft.plan.workload import (
    Workload,
    make_workload,
    mean_before_the_cut,
    quantiles,
)


def test_quantiles_have_the_mean_and_the_limit() -> None:
    free = quantiles(5000, mean_tokens=1000, sigma=0.5, limit=10**9)
    assert sum(free) / 5000 == pytest.approx(1000, rel=0.005)
    cut = quantiles(5000, mean_tokens=1000, sigma=0.5, limit=1200)
    assert max(cut) == 1200
    assert [n for n in cut if n < 1200] == [n for n in free if n < 1200]
    assert quantiles(3, mean_tokens=70, sigma=0, limit=50) == [50, 50, 50]


@pytest.mark.parametrize("measured", [300.0, 900.0, 1150.0])
def test_the_mean_before_the_cut_gives_the_measured_one(measured: float) -> None:
    mean = mean_before_the_cut(measured, sigma=0.5, limit=1200)
    values = quantiles(400, mean_tokens=mean, sigma=0.5, limit=1200)
    assert sum(values) / 400 == pytest.approx(measured, rel=0.01)


def test_only_finished_responses_are_accepted() -> None:
    sizes = ("data.prompts_per_step=100", "rollout.group_size=10")
    job = make_job(LARGE, 8, *sizes, "rollout.max_response_tokens=2000")

    def made(acceptance: float) -> Workload:
        return make_workload(
            job.config, mean_tokens=2000, sigma=0.9, acceptance=acceptance, prompt_tokens=50
        )

    some = made(0.4)
    assert (len(some.lengths), len(some.trained)) == (1000, 400)
    assert max(some.trained) < 2000
    assert sum(some.sequences) == sum(some.trained) + 400 * 50
    assert len(made(1.0).trained) == sum(n < 2000 for n in some.lengths) < 1000
    assert made(0.0).trained == ()


def test_the_usual_mean_stays_below_every_limit() -> None:
    def mean(limit: int) -> float:
        job = make_job(LARGE, 8, f"rollout.max_response_tokens={limit}")
        return make_workload(job.config, sigma=0.0).mean_tokens

    assert mean(3500) == mean(16384) == 2186.0
    assert mean(64) == pytest.approx(0.6246 * 64, rel=1e-2)
