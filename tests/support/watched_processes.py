"""Processes that do nothing but be watched, as if two ranks were on each of several nodes.

Behaviours: `well` waits for what comes; `leave` ends in order; `die`, `stop`, `stuck` and `fail`
are faults; `fall` fails of what happened to another, before that one is known. After a moment.
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from torch.distributed import TCPStore

from megatron_opsft.runtime.diagnosis import Limits
from megatron_opsft.runtime.job import Job
from megatron_opsft.runtime.phase import enter_phase
from megatron_opsft.runtime.watchdog import Process, Watchdog, this_process

LIMITS = Limits(hang_seconds=5.0, silence_seconds=4.0)


def run_processes(behaviours: Sequence[str], said: Path) -> list[int]:
    """Exit codes; what all write to standard error is in `said`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pids = []
    for rank in range(len(behaviours)):
        if not (pid := os.fork()):
            try:
                with said.open("a") as errors:
                    os.dup2(errors.fileno(), 2)
                sys.stderr = os.fdopen(2, "w", buffering=1)
                _be_watched(rank, behaviours, port)
            finally:
                os._exit(17 if sys.exc_info()[0] else 0)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def _be_watched(rank: int, behaviours: Sequence[str], port: int) -> None:
    world_size, behaviour = len(behaviours), behaviours[rank]
    store = TCPStore("localhost", port, None, rank == 0, wait_for_workers=False)
    me = replace(this_process(rank), host=f"node{rank // 2}")
    store.set(f"process{rank}", json.dumps(asdict(me)))
    names = [f"process{other}" for other in range(world_size)]
    processes = [Process(**json.loads(text)) for text in store.multi_get(names)]
    job = Job(rank=rank, world_size=world_size, id="job", store=store)
    enter_phase("start", 0)  # the process is as old as the one that it was forked from
    watchdog = Watchdog(job, processes, LIMITS)
    enter_phase("rollout", 7)
    time.sleep(1.5)
    if behaviour == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if behaviour == "fail":
        _report(watchdog, rank, 3, "not a number")
    if behaviour == "fall":
        time.sleep(0.1)
        _report(watchdog, rank, 1, "connection closed")
    if behaviour == "leave":
        watchdog.leave()
        return
    if behaviour == "stuck":
        time.sleep(60)
    enter_phase("train")  # one that is stuck is behind the others
    time.sleep(60)


def _report(watchdog: Watchdog, rank: int, code: int, message: str) -> None:
    """As the command line does."""
    diagnosis = watchdog.report(code, message)
    if diagnosis is None or diagnosis.rank == rank:
        print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(diagnosis.code if diagnosis else 1)
