"""Engines that take from each other: the same responses at the same ranks, whoever made them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_run import QUICKSTART, SMALL_RUN
from world import World

from megatron_opsft.config_file import load_config
from megatron_opsft.records import Rollout
from megatron_opsft.rollout.hf.engine import HfEngine
from megatron_opsft.rollout.limits import engines_steal
from megatron_opsft.session import Session, open_session

Found = tuple[list[Rollout], int]
"""A rank's rollouts, and how many responses its engine has made."""


@contextmanager
def slowed(engine: Any, seconds: float) -> Iterator[list[int]]:
    """The engine waits after every few tokens; counts what it makes."""
    stream, made = engine.stream, [0]

    def slow(take: Any, sampling: Any) -> Iterator[list[Rollout]]:
        for rollouts in stream(take, sampling):
            made[0] += len(rollouts)
            time.sleep(seconds)
            yield rollouts

    engine.stream = slow
    yield made
    engine.stream = stream


def sample(session: Session, slow_rank: int, *, steals: bool) -> Found:
    sampler = replace(session.sampler, steals=steals)
    seconds = 0.1 if session.layout.rank == slow_rank else 0.0
    with slowed(sampler.engine, seconds) as made:
        problems = session.problems_of(1)
        found = sampler.sample(problems, session.settings, num_samples=4, step=1)
    return found, made[0]


def all_ways(run_dir: Path) -> tuple[bool, list[Found]]:
    """Whether the run's own sampler steals; then without stealing, and with either rank slow."""
    config = load_config(Path(QUICKSTART), [*SMALL_RUN, f"run.dir={run_dir}"])
    with open_session(config) as session:
        assert isinstance(session.sampler.engine, HfEngine)
        session.sampler.engine.batch_size = 2
        session.sync.push(0, session.probes(0))
        fixed = sample(session, -1, steals=False)
        found = [sample(session, slow_rank, steals=True) for slow_rank in (0, 1)]
        return session.sampler.steals, [fixed, *found]


def test_a_slow_engine_loses_work_and_nothing_else_changes(world: World, tmp_path: Path) -> None:
    by_rank = world.run(all_ways, 2, tmp_path / "run")
    assert all(steals for steals, _ in by_rank)
    fixed, slow_first, slow_second = zip(*(found for _, found in by_rank), strict=True)
    expected = sorted((r for rollouts, _ in fixed for r in rollouts), key=str)
    assert len(expected) == 24
    for stolen in (slow_first, slow_second):
        assert sorted((r for rollouts, _ in stolen for r in rollouts), key=str) == expected
        assert [len(rollouts) for rollouts, _ in stolen] == [12, 12]
    # Where a response ends up does not depend on who was fast.
    assert [rollouts for rollouts, _ in slow_first] == [rollouts for rollouts, _ in slow_second]
    made = [[count for _, count in found] for found in (slow_first, slow_second)]
    assert made[0][0] < made[0][1] and made[1][1] < made[1][0]
    assert sum(made[0]) == sum(made[1]) == 24


@pytest.mark.parametrize(
    ("overrides", "steals"),
    [
        ([], True),
        (["model.dtype=bfloat16"], False),
        (["model.dtype=bfloat16", "rollout.dealing=stealing"], True),
        (["rollout.dealing=fixed"], False),
    ],
)
def test_engines_steal_where_batches_do_not_matter(overrides: list[str], steals: bool) -> None:
    config = load_config(Path(QUICKSTART), overrides)
    assert engines_steal(config, 2, is_cuda=False) == steals
    assert not engines_steal(config, 1, is_cuda=False)
    vllm = load_config(Path(QUICKSTART), [*overrides, "rollout.engine=vllm"])
    assert engines_steal(vllm, 2, is_cuda=True) == ("rollout.dealing=fixed" not in overrides)
