"""Hosts of engines as on other nodes, and what the training ranks do with them."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from megatron_opsft.run.recorder import RunRecorder
from megatron_opsft.session import Session
from megatron_opsft.train import run_step

# As slurm/engine.sh does it.
_LOOP = 'while :; do "$@" & wait $!; sleep 0.2; done'


@contextmanager
def engine_hosts(directory: Path, count: int) -> Iterator[list[str]]:
    """Overrides of a run on so many hosts, each started again when it ends."""
    token = directory / "token"
    token.write_text(os.urandom(32).hex())
    token.chmod(0o600)
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    loops = []
    for address in addresses:
        command = [sys.executable, "-m", "megatron_opsft", "engine", "--listen", address]
        command += ["--token-file", str(token), "--log-dir", str(directory)]
        loop = ["bash", "-c", _LOOP, "loop", *command]
        loops.append(subprocess.Popen(loop, stdout=subprocess.DEVNULL, start_new_session=True))
    try:
        yield [
            "rollout.placement=separate",
            f"rollout.engines={','.join(addresses)}",
            f"rollout.engine_token_file={token}",
            "rollout.engine_timeout_seconds=60",
        ]
    finally:
        for each in loops:
            os.killpg(each.pid, signal.SIGKILL)
            each.wait()


def differing_weights(session: Session) -> list[str]:
    """Names of HF tensors that this rank's engine does not hold bit for bit."""
    engine: Any = session.sampler.engine
    wrong = []
    for name, ours in session.sync.exporter.stream():
        ((theirs,),) = engine.fleet.call("parameter", lambda number, name=name: (name,)).values()
        kind = torch.int16 if ours.itemsize == 2 else torch.int32
        if not torch.equal(ours.contiguous().view(kind), theirs.view(kind)):
            wrong.append(name)
    return wrong


def push_steps(
    session: Session, recorder: RunRecorder, num_steps: int
) -> list[tuple[str, int, list[str]]]:
    """Real steps; of each push its way, the bytes sent, wrong tensors."""
    found = []
    push = session.sync.push

    def noting(version: int, samples: Any) -> Any:
        result = push(version, samples)
        wrong = differing_weights(session)
        found.append((result.path, result.bytes_sent, wrong))
        return result

    session.sync.push = noting  # type: ignore[method-assign]
    for _ in range(num_steps):
        run_step(session, recorder, session.sync.version + 1)
    session.sync.push = push  # type: ignore[method-assign]
    return found


def undisturbed(session: Session, recorder: RunRecorder) -> list[tuple[float, float]]:
    """Losses and gradient norms of three steps from the saved weights on."""
    saved = session.checkpointer.directory / "step_000000"
    session.trainer.finish_gathering_weights()
    if saved.exists():
        session.checkpointer.load(saved)
    else:
        session.checkpointer.save(0, {})
    session.sync.push(0)
    for step in range(1, 4):
        run_step(session, recorder, step)
    lines = (session.config.run.dir / "metrics.jsonl").read_text().splitlines()
    return [(m["loss"], m["grad_norm"]) for m in map(json.loads, lines[-3:])]


def with_a_lost_node(session: Session, recorder: RunRecorder) -> list[tuple[float, float]]:
    """The same; the node of rank 1's engine dies while it samples in a step, and another time
    between two requests.
    """
    engine: Any = session.sampler.engine
    hit: list[int] = []

    def lose_node() -> None:
        (pid,) = engine.pids
        host = psutil.Process(pid).parent()
        assert host is not None
        hit.append(pid)
        host.kill()  # its engine process dies with it

    train, sample, steps = session.trainer.step, engine.stream, [0]

    def sampling(*args: Any) -> Any:
        steps[0] += 1
        if session.layout.rank == 1 and steps[0] == 2:
            threading.Timer(0.1, lose_node).start()
        return sample(*args)

    def training(*args: Any, **kwargs: Any) -> Any:
        if session.layout.rank == 1 and steps[0] == 3:
            lose_node()
        return train(*args, **kwargs)

    engine.stream = sampling
    session.trainer.step = training  # type: ignore[method-assign]
    result = undisturbed(session, recorder)
    del engine.stream, session.trainer.step
    assert len(set(hit)) == (2 if session.layout.rank == 1 else 0)
    return result
