"""vLLM in a process of its own: the same weights and responses, and a run that outlives it."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_processes import engine_processes
from vllm_jobs import (
    QUICKSTART,
    SMALL,
    KeptSession,
    scaled_shard,
    train_and_compare,
    with_session,
)
from world import JobFailed, World

from megatron_opsft.errors import EngineDied, SyncError
from megatron_opsft.records import Rollout
from megatron_opsft.rollout.remote.client import EngineClient
from megatron_opsft.rollout.remote.engine_process import EngineProcess
from megatron_opsft.run.recorder import RunRecorder
from megatron_opsft.runtime.step_names import list_checkpoints
from megatron_opsft.session import Session
from megatron_opsft.train import run_step

pytestmark = pytest.mark.vllm

SEPARATE = ["rollout.placement=separate", "rollout.engine_timeout_seconds=12"]
LAYOUTS = {
    "1 rank, 1 engine": (1, []),
    "train TP2, 2 engines": (2, ["parallel.tp=2", "rollout.num_engines=2"]),
    "train PP2, 1 engine": (2, ["parallel.pp=2", "sync.bucket_mb=1"]),
}


@pytest.fixture(scope="module")
def session(
    vllm_world: World, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> KeptSession:
    """The tests of one layout follow each other in one session, from the shipped weights on."""
    ranks, overrides = LAYOUTS[request.param]
    run_dir = tmp_path_factory.mktemp("session") / "run"
    return KeptSession(vllm_world, run_dir, ranks, [*SEPARATE, *overrides, "optimizer.lr=5e-4"])


def in_layouts(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("session", names, indirect=True)


def rollouts_of_a_step(session: Session, recorder: RunRecorder) -> list[Rollout]:
    return session.sampler.sample(session.problems_of(1), session.settings, num_samples=4, step=1)


@pytest.fixture(scope="module")
def colocated(vllm_world: World, tmp_path_factory: pytest.TempPathFactory) -> list[Rollout]:
    """The responses of an engine inside one training rank."""
    run_dir = tmp_path_factory.mktemp("colocated") / "run"
    (found,) = vllm_world.run(with_session, 1, run_dir, [], rollouts_of_a_step)
    return sorted(found, key=str)


@in_layouts(*LAYOUTS)
def test_responses_are_those_of_a_colocated_engine(
    colocated: list[Rollout], session: KeptSession
) -> None:
    parts = session.run(rollouts_of_a_step)
    assert all(len(part) == 16 / len(parts) for part in parts)  # every rank has its share to verify
    assert sorted((r for part in parts for r in part), key=str) == colocated


@in_layouts(*LAYOUTS)
def test_engine_log_probs_match_hf_after_each_step_and_a_pull_is_exact(
    session: KeptSession,
) -> None:
    for differences, ways, not_pulled in session.run(train_and_compare, 3, timeout=300):
        assert len(differences) == 3
        assert max(differences) < 1e-4
        assert ways == ["stream"] * 3
        assert not_pulled == 0


@contextmanager
def kill_when_sampling(
    session: Session, delays: dict[int, float], how: signal.Signals
) -> Iterator[list[int]]:
    """The n-th request for samples is followed, `delays[n]` seconds later and before anyone looks
    for the answer, by a signal to the engine's process. Yields the processes that were hit, as they
    are.
    """
    engine: Any = session.sampler.engine
    fleet = engine.fleet
    send = fleet.send
    hit: list[int] = []
    asked = 0

    def sending(method: str, *arguments: Any) -> None:
        nonlocal asked
        send(method, *arguments)
        if method == "sample" and engine.pids:
            asked += 1
            if asked in delays:
                (pid,) = engine.pids
                hit.append(pid)
                time.sleep(delays[asked])
                os.kill(pid, how)

    fleet.send = sending
    yield hit
    fleet.send = send


def start_again(session: Session) -> None:
    """The weights and the optimizer's state are again those of the first call."""
    session.trainer.finish_gathering_weights()
    saved = list_checkpoints(session.checkpointer.directory)
    if saved:
        session.checkpointer.load(saved[0])
    else:
        session.checkpointer.save(0, {})
    session.sync.push(0)


def last_losses(session: Session) -> list[tuple[float, float]]:
    """Losses and gradient norms of the last three steps; on rank 0."""
    lines = (session.config.run.dir / "metrics.jsonl").read_text().splitlines()
    return [(m["loss"], m["grad_norm"]) for m in map(json.loads, lines[-3:])]


def undisturbed(session: Session, recorder: RunRecorder) -> list[tuple[float, float]]:
    start_again(session)
    for step in range(1, 4):
        run_step(session, recorder, step)
    return last_losses(session)


def killed(session: Session, recorder: RunRecorder) -> list[tuple[float, float]]:
    """In a first request, and in the request that was asked again."""
    delays = {1: random.Random(0).uniform(0, 0.2), 2: 0.05}
    with kill_when_sampling(session, delays, signal.SIGKILL) as hit:
        result = undisturbed(session, recorder)
    assert len(set(hit)) == (2 if session.sampler.engine.replica.answers else 0)
    return result


def hung_once(session: Session, recorder: RunRecorder) -> list[tuple[float, float]]:
    with kill_when_sampling(session, {2: 0.05}, signal.SIGSTOP) as hit:
        result = undisturbed(session, recorder)
    assert len(hit) == session.sampler.engine.replica.answers
    assert not any(psutil.pid_exists(pid) for pid in hit)
    return result


def killed_between(session: Session, recorder: RunRecorder) -> list[tuple[float, float]]:
    """While nothing is asked of it: the next push finds it dead."""
    start_again(session)
    run_step(session, recorder, 1)
    engine: Any = session.sampler.engine
    train = session.trainer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        for pid in engine.pids:
            os.kill(pid, signal.SIGKILL)
        return train(*args, **kwargs)

    session.trainer.step = step  # type: ignore[method-assign]
    run_step(session, recorder, 2)
    session.trainer.step = train  # type: ignore[method-assign]
    run_step(session, recorder, 3)
    return last_losses(session)


@in_layouts("1 rank, 1 engine", "train PP2, 1 engine")
def test_a_dead_or_hung_engine_changes_nothing(session: KeptSession) -> None:
    acts = [killed] if session.ranks == 1 else [hung_once, killed_between]
    expected = session.run(undisturbed)[0]
    assert len(expected) == 3
    for act in acts:
        assert session.run(act, timeout=300)[0] == expected, act.__name__


def scaled_push(session: Session, recorder: RunRecorder) -> str:
    with scaled_shard(session), pytest.raises(SyncError) as caught:
        session.sync.push(1, session.probes(1))
    return str(caught.value)


@in_layouts("train PP2, 1 engine")
def test_a_scaled_tensor_stops_the_run(session: KeptSession) -> None:
    for said in session.run(scaled_push):
        assert "model.layers.2.mlp.down_proj.weight" in said


def test_no_engine_outlives_a_killed_run(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    command = [sys.executable, "-m", "megatron_opsft", "train", str(QUICKSTART)]
    command += [*SMALL, *SEPARATE, f"run.dir={tmp_path}"]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        metrics = tmp_path / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not metrics.exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        engines = engine_processes(run.pid)
        assert len(engines) == 1
    finally:
        run.kill()
        run.wait()
    gone, alive = psutil.wait_procs(engines, timeout=10)
    assert not alive


def test_an_engine_that_ends_before_it_is_there_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/true")
    log_file = tmp_path / "engine.log"
    client = EngineClient(lambda context: EngineProcess(context, log_file, ()), 60)
    with pytest.raises(EngineDied, match="ended with code 0"):
        client.start("settings", "shape")
    client.close()


def test_an_engine_that_cannot_start_ends_the_run(vllm_world: World, tmp_path: Path) -> None:
    """The last test: its failed job ends the workers."""
    overrides = [*SEPARATE, "rollout.kv_cache_bytes=1"]
    with pytest.raises(JobFailed, match="vLLM refuses this model"):
        vllm_world.run(with_session, 1, tmp_path, overrides, rollouts_of_a_step)
