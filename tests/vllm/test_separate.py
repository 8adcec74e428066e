"""vLLM in a process of its own: the same weights and responses, and a run that outlives it."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from vllm_jobs import QUICKSTART, SMALL, train_and_compare, with_session
from world import JobFailed, World

from megatron_opsft.errors import EngineDied, SyncError
from megatron_opsft.records import Rollout
from megatron_opsft.rollout.remote.client import EngineClient
from megatron_opsft.run.recorder import RunRecorder
from megatron_opsft.session import Session
from megatron_opsft.train import run_step

pytestmark = pytest.mark.vllm

SEPARATE = ["rollout.placement=separate"]
LAYOUTS = {
    "1 rank, 1 engine": (1, []),
    "train TP2, 2 engines": (2, ["parallel.tp=2", "rollout.num_engines=2"]),
    "train PP2, 1 engine": (2, ["parallel.pp=2"]),
}


@pytest.mark.parametrize(
    ("name", "steps"),
    [("1 rank, 1 engine", 20), ("train TP2, 2 engines", 5), ("train PP2, 1 engine", 5)],
)
def test_engine_log_probs_match_hf_after_each_step_and_a_pull_is_exact(
    vllm_world: World, tmp_path: Path, name: str, steps: int
) -> None:
    ranks, overrides = LAYOUTS[name]
    overrides = [*SEPARATE, *overrides, "optimizer.lr=5e-4"]
    results = vllm_world.run(train_and_compare, ranks, tmp_path, overrides, steps, timeout=400)
    for differences, ways, not_pulled in results:
        assert len(differences) == steps
        assert max(differences) < 1e-4
        assert ways == ["stream"] * steps
        assert not_pulled == 0


def rollouts_of_a_step(session: Session, recorder: RunRecorder) -> list[Rollout]:
    return session.sampler.sample(session.problems_of(1), session.settings, num_samples=4, step=1)


def test_responses_are_those_of_a_colocated_engine(vllm_world: World, tmp_path: Path) -> None:
    found = []
    for ranks, overrides in (
        (1, []),
        (2, [*SEPARATE, "rollout.num_engines=2"]),
        (2, [*SEPARATE, "sync.bucket_mb=1"]),
    ):
        parts = vllm_world.run(with_session, ranks, tmp_path, overrides, rollouts_of_a_step)
        assert all(len(part) == 16 / ranks for part in parts)  # every rank has its share to verify
        found.append(sorted((r for part in parts for r in part), key=str))
    assert found[1:] == [found[0]] * 2


def kill_when_sampling(
    session: Session, delays: dict[int, float], how: signal.Signals
) -> list[int]:
    """From now on the n-th request for samples is followed, `delays[n]` seconds later and before
    anyone looks for the answer, by a signal to the engine's process. Returns the processes that
    were hit, as they are.
    """
    engine: Any = session.sampler.engine
    ask = engine._attempt
    hit: list[int] = []
    asked = 0

    def attempt(act: Any) -> Any:
        nonlocal asked
        client = engine._client
        if client is None:
            return ask(act)
        send = client.send

        def sending(method: str, *arguments: Any) -> None:
            nonlocal asked
            send(method, *arguments)
            if method == "sample":
                asked += 1
                if asked in delays:
                    hit.append(client.pid)
                    time.sleep(delays[asked])
                    os.kill(client.pid, how)

        client.send = sending
        try:
            return ask(act)
        finally:
            client.send = send

    engine._attempt = attempt
    return hit


def losses(run_dir: Path) -> list[tuple[float, float]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [(m["loss"], m["grad_norm"]) for m in map(json.loads, lines)]


def undisturbed(session: Session, recorder: RunRecorder) -> list[tuple[float, float]]:
    for step in range(1, 4):
        run_step(session, recorder, step)
    return losses(session.config.run.dir)


def killed(session: Session, recorder: RunRecorder) -> list[tuple[float, float]]:
    """Twice in a first request, once in the request that was asked again."""
    draw = random.Random(0)
    delays = {1: draw.uniform(0, 0.2), 2: 0.05, 4: draw.uniform(0, 0.2)}
    hit = kill_when_sampling(session, delays, signal.SIGKILL)
    result = undisturbed(session, recorder)
    assert len(set(hit)) == (3 if session.sampler.engine.replica.answers else 0)
    return result


def hung_once(session: Session, recorder: RunRecorder) -> list[tuple[float, float]]:
    hit = kill_when_sampling(session, {2: 0.05}, signal.SIGSTOP)
    result = undisturbed(session, recorder)
    assert len(hit) == session.sampler.engine.replica.answers
    assert not any(psutil.pid_exists(pid) for pid in hit)
    return result


def killed_between(session: Session, recorder: RunRecorder) -> list[tuple[float, float]]:
    """While nothing is asked of it: the next push finds it dead."""
    run_step(session, recorder, 1)
    engine: Any = session.sampler.engine
    train = session.trainer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        if engine.pid is not None:
            os.kill(engine.pid, signal.SIGKILL)
        return train(*args, **kwargs)

    session.trainer.step = step  # type: ignore[method-assign]
    run_step(session, recorder, 2)
    session.trainer.step = train  # type: ignore[method-assign]
    run_step(session, recorder, 3)
    return losses(session.config.run.dir)


@pytest.mark.parametrize(
    ("ranks", "acts"), [(1, [killed]), (2, [hung_once, killed_between])], ids=["1", "2"]
)
def test_a_dead_or_hung_engine_changes_nothing(
    vllm_world: World, tmp_path: Path, ranks: int, acts: list[Any]
) -> None:
    overrides = [*SEPARATE, f"parallel.tp={ranks}", "rollout.engine_timeout_seconds=12"]
    found = {}
    for act in (undisturbed, *acts):
        results = vllm_world.run(with_session, ranks, tmp_path, overrides, act, timeout=300)
        found[act.__name__] = results[0]
    assert len(found["undisturbed"]) == 3
    for name, result in found.items():
        assert result == found["undisturbed"], name


def scaled_push(session: Session, recorder: RunRecorder) -> str:
    stream = session.sync.exporter.stream

    def scaled() -> Any:
        for name, tensor in stream():
            yield name, tensor * 1.01 if name.endswith("2.mlp.down_proj.weight") else tensor

    session.sync.exporter.stream = scaled  # type: ignore[method-assign]
    with pytest.raises(SyncError) as caught:
        session.sync.push(1, session.probes(1))
    return str(caught.value)


def test_a_scaled_tensor_stops_the_run(vllm_world: World, tmp_path: Path) -> None:
    overrides = [*SEPARATE, "parallel.pp=2", "sync.verify=checksum"]
    for said in vllm_world.run(with_session, 2, tmp_path, overrides, scaled_push):
        assert "model.layers.2.mlp.down_proj.weight" in said


def test_an_engine_that_cannot_start_ends_the_run(vllm_world: World, tmp_path: Path) -> None:
    overrides = [*SEPARATE, "rollout.kv_cache_bytes=1"]
    with pytest.raises(JobFailed, match="vLLM refuses this model"):
        vllm_world.run(with_session, 1, tmp_path, overrides, rollouts_of_a_step)


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
        engines = [
            p
            for p in psutil.Process(run.pid).children()
            if "rollout.remote.process" in str(p.cmdline())
        ]
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
    client = EngineClient(tmp_path / "engine.log", devices=[], timeout_seconds=60)
    with pytest.raises(EngineDied, match="ended with code 0"):
        client.start("settings", "shape")
    client.close()
