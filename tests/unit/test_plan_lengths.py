"""Response lengths of a plan, and how engines get through them."""

import re
from pathlib import Path

import pytest
from forked_cli import ROOT

from megatron_opsft.config_file import load_config
from megatron_opsft.plan.checks import check_job
from megatron_opsft.plan.decoding import refilled_segments, static_segments
from megatron_opsft.plan.estimate import estimate_run
from megatron_opsft.plan.hardware import load_hardware
from megatron_opsft.plan.job import TrainingJob
from megatron_opsft.plan.lengths import (
    DEFAULT_SIGMA,
    PAPER_ACCEPTANCE,
    make_workload,
    mean_before_the_cut,
    quantiles,
    usual_mean_tokens,
)
from megatron_opsft.plan.options import ResponseOptions, load_shape
from megatron_opsft.plan.stages import count_stages


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
    made = make_workload(
        1000, mean_tokens=2000, sigma=0.9, limit=2000, acceptance=0.4, prompt_tokens=50
    )
    assert len(made.lengths) == 1000
    assert len(made.accepted) == 400
    assert max(made.accepted) < 2000
    assert made.trained_tokens == sum(made.accepted) + 400 * 50
    finished = sum(n < 2000 for n in made.lengths)
    greedy = make_workload(
        1000, mean_tokens=2000, sigma=0.9, limit=2000, acceptance=1.0, prompt_tokens=50
    )
    assert len(greedy.accepted) == finished < 1000


def by_hand(lengths: list[int], prompt: int, slots: int) -> list[tuple[int, float]]:
    """(batch, mean tokens held) of each decoding step, one token at a time."""
    waiting, running, steps = list(lengths), [], []
    while waiting or running:
        while waiting and len(running) < slots:
            running.append([prompt, waiting.pop(0)])
        steps.append((len(running), sum(held for held, _ in running) + len(running) / 2))
        running = [[held + 1, left - 1] for held, left in running if left > 1]
    return steps


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_decoding_with_refilled_slots_is_as_token_by_token(slots: int) -> None:
    lengths = [7, 3, 3, 12, 1, 5, 9]
    segments = refilled_segments(lengths, 10, slots)
    steps = by_hand(lengths, 10, slots)
    assert sum(s.num_steps for s in segments) == len(steps)
    assert sum(s.num_steps * s.batch for s in segments) == sum(lengths)
    held = sum(s.num_steps * s.context for s in segments)
    assert held == pytest.approx(sum(tokens for _, tokens in steps))


def test_a_batch_without_refill_is_as_the_engine_makes_it() -> None:
    lengths, limit = [4, 2, 9, 1, 3, 30, 30, 29], 30
    # Row by row, token by token, as `HfEngine._decode` does it.
    steps = []
    for batch in (lengths[:5], lengths[5:]):
        rows = list(batch)
        for t in range(limit):
            if t % 4 == 3 or t + 1 == limit:
                finished = sum(n <= t + 1 for n in rows)
                if finished == len(rows):
                    break
                if finished >= 0.25 * len(rows):
                    rows = [n for n in rows if n > t + 1]
            steps.append((len(rows), len(rows) * (7 + t + 1)))
    segments = static_segments(lengths, 7, 5, limit)
    assert sum(s.num_steps for s in segments) == len(steps) == 11 + 29
    assert sum(s.num_steps * s.batch for s in segments) == sum(batch for batch, _ in steps)
    held = sum(s.num_steps * s.context for s in segments)
    assert held == pytest.approx(sum(tokens for _, tokens in steps))


def test_the_usual_mean_stays_below_every_limit() -> None:
    assert usual_mean_tokens(3500) == usual_mean_tokens(16384) == 2186.0
    assert usual_mean_tokens(64) == pytest.approx(0.6246 * 64, rel=1e-3)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples/configs").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_shipped_configuration_plans(path: Path) -> None:
    """On its header's nodes, with the paper's share accepted: a step takes two minutes at most,
    or what an engine takes for the longest response at 6 ms a token (weights read: 4.5 ms).
    """
    config = load_config(path)
    nodes = re.search(r"--nodes (\d+)", path.read_text(encoding="utf-8"))
    job = TrainingJob(
        config=config,
        shape=load_shape(config.model.path),
        hardware=load_hardware("h100"),
        world_size=8 * int(nodes[1]) if nodes else 8,
    )
    check_job(job)
    responses = ResponseOptions(
        mean_tokens=None, sigma=DEFAULT_SIGMA, acceptance=PAPER_ACCEPTANCE, prompt_tokens=150
    ).workload(job)
    assert len(responses.accepted) == round(PAPER_ACCEPTANCE * job.num_responses)
    estimate = estimate_run(job, count_stages(job), responses, config.run.steps)
    assert estimate.fits
    longest = 6e-3 * config.rollout.max_response_tokens
    assert 0 < estimate.step.train < estimate.step.total < max(120, longest)
