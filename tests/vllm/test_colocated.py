"""vLLM inside the training ranks: it samples from the trainer's weights, and a push that went wrong
does not pass unnoticed.

The tests of one layout follow each other in one session, from the shipped weights on.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from vllm_jobs import (
    KeptSession,
    engine_against_disk,
    kept_by_a_closed_session,
    scaled_shard,
    train_and_compare,
)
from world import World

from megatron_opsft.errors import SyncError
from megatron_opsft.records import Rollout
from megatron_opsft.rollout.requests import make_requests
from megatron_opsft.run.record.recorder import RunRecorder
from megatron_opsft.run.start.session import Session
from megatron_opsft.run.train import run_step

pytestmark = pytest.mark.vllm

# Few responses: with two tensor-parallel ranks on two cores a token costs 10 ms.
TP2 = ["rollout.tp=2", "data.prompts_per_step=2", "rollout.group_size=2"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "1 rank": (1, []),
    "train TP2, rollout TP1": (2, ["parallel.tp=2"]),
    "train PP2, rollout TP2": (2, ["parallel.pp=2", "sync.bucket_mb=1", *TP2]),
    "train TP2, rollout TP2": (2, ["parallel.tp=2", *TP2]),
}


@pytest.fixture(scope="module")
def session(
    vllm_world: World, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> KeptSession:
    ranks, overrides = LAYOUTS[request.param]
    run_dir = tmp_path_factory.mktemp("session") / "run"
    return KeptSession(vllm_world, run_dir, ranks, [*overrides, "optimizer.lr=5e-4"])


Spoilt = Callable[[Session], AbstractContextManager[None]]


def in_layouts(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("session", names, indirect=True)


@in_layouts(*LAYOUTS)
def test_shards_from_the_engine_are_those_from_disk(
    session: KeptSession, request: pytest.FixtureRequest
) -> None:
    """The first test of every session: it looks at how it started."""
    for peak_bytes, wrong in session.run(engine_against_disk):
        assert wrong == []
        if request.node.callspec.params["session"] == "train PP2, rollout TP2":
            assert 2**18 < peak_bytes <= 2 * 2**20  # half of a stage comes from the other rank


def refuse_without_weights(session: Session, recorder: RunRecorder) -> None:
    """The weights are there again afterwards."""
    engine: Any = session.sampler.engine
    engine.begin_update()
    with pytest.raises(RuntimeError, match="holds no complete set of weights"):
        engine.generate(make_requests("p", (1, 2), 1, 0, 1), session.settings)
    session.sync.push(session.sync.version)


@in_layouts("1 rank")
def test_a_request_is_refused_before_a_push_is_complete(session: KeptSession) -> None:
    session.run(refuse_without_weights)


def sample_thrice(session: Session, recorder: RunRecorder) -> list[list[Rollout]]:
    """Twice by seeds, and without any."""
    return [
        session.sampler.sample(
            session.problems.problems[:4],
            replace(session.settings, seeded=seeded),
            num_samples=4,
            step=1,
        )
        for seeded in (True, True, False)
    ]


@pytest.fixture(scope="module")
def sampled() -> dict[int, dict[tuple[str, int], Rollout]]:
    """The responses of the first layout that was asked."""
    return {}


@in_layouts(*LAYOUTS)
def test_responses_depend_on_their_seeds_and_not_on_the_ranks(
    session: KeptSession, sampled: dict[int, dict[tuple[str, int], Rollout]]
) -> None:
    """Without seeds they are others and all different: the ranks of an engine draw the same tokens,
    and two engines never the same ones.
    """
    first, again, unseeded = (
        {(r.problem_id, r.sample_index): r for rollouts in of_ranks for r in rollouts}
        for of_ranks in zip(*session.run(sample_thrice), strict=True)
    )
    assert first == again == sampled.setdefault(0, first)
    assert len(first) == len(unseeded) == 16
    assert len({r.response_ids for r in (*first.values(), *unseeded.values())}) == 32


@in_layouts(*LAYOUTS)
def test_engine_log_probs_match_hf_after_each_step_and_a_pull_is_exact(
    session: KeptSession,
) -> None:
    steps = 6 if session.ranks == 1 else 2
    for differences, not_pulled in session.run(train_and_compare, steps):
        assert len(differences) == steps
        assert max(differences) < 1e-4
        assert not_pulled == 0


def outcome(
    session: Session, recorder: RunRecorder, spoilt: Spoilt, verify: str
) -> tuple[str, int]:
    """A good step, then one whose push is spoilt: what the run says of it, and the push's version.
    All is well again afterwards.
    """
    sync: Any = session.sync
    config = sync.config
    sync.config = config.model_copy(update={"verify": verify})
    run_step(session, recorder, sync.version + 1)
    version = sync.version + 1
    with spoilt(session), pytest.raises(SyncError) as caught:
        run_step(session, recorder, version)
    assert sync.version == version
    sync.config = config
    sync.push(version)
    return str(caught.value), version


def kept_prefix_cache(session: Session) -> Any:
    """vLLM says that it dropped its cache, and did not."""
    engine: Any = session.sampler.engine
    return patch.object(engine._llm, "reset_prefix_cache", return_value=True)


SPOILT: dict[str, tuple[Spoilt, str, str]] = {
    "1 rank": (scaled_shard, "full", "down_proj.weight"),
    "train TP2, rollout TP1": (scaled_shard, "checksum", "down_proj.weight"),
    "train PP2, rollout TP2": (kept_prefix_cache, "full", "cached"),
}


@in_layouts(*SPOILT)
def test_a_push_that_went_wrong_stops_the_run(
    session: KeptSession, request: pytest.FixtureRequest
) -> None:
    spoilt, verify, words = SPOILT[request.node.callspec.params["session"]]
    for said, version in session.run(outcome, spoilt, verify):
        assert words in said and f"version {version}" in said


def test_a_closed_session_keeps_nothing_of_its_engine(vllm_world: World, tmp_path: Path) -> None:
    """On a GPU a second engine of the process could not start beside it."""
    assert vllm_world.run(kept_by_a_closed_session, 1, tmp_path / "run", []) == [(0, False)]
