"""The watchdog: whose fault it is, and that all processes end with one message, whoever fails.

The processes do nothing but be watched, as if two ranks were on each of several nodes. `well` waits
for what comes; `leave` ends in order; `die`, `stop`, `stuck` and `fail` are faults; `fall` fails of
what happened to another, before that one is known; `spoil` is a stranger, and leaves in order.
After a moment.
"""

import hmac
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from processes import free_ports
from torch.distributed import TCPStore

from megatron_opsft.runtime.failed_rank import PEER_LOST_EXIT_CODE as LOST
from megatron_opsft.runtime.failed_rank import (
    SETTLE_SECONDS,
    Diagnosis,
    Failure,
    Limits,
    Peer,
    find_failed_rank,
)
from megatron_opsft.runtime.job import Job
from megatron_opsft.runtime.phase import enter_phase
from megatron_opsft.runtime.watchdog import Process, Watchdog, this_process

LIMITS = Limits(hang_seconds=600, silence_seconds=60)


def peer(rank: int, **known: object) -> Peer:
    return replace(
        Peer(rank=rank, name=f"rank {rank} on n", heard_at=1000.0, entered_at=990.0), **known
    )


FAILED = peer(0, failure=Failure(1, 1, "connection closed"), failed_at=1000.9)
ANSWERED = 1000.9 + SETTLE_SECONDS
STILL = [
    peer(r, heard_at=1640, entered_at=1030.0, phase_number=8, where="phase train") for r in range(3)
]
STILL[1] = peer(1, heard_at=1640, entered_at=1039.0, phase_number=7, where="phase verify")


@pytest.mark.parametrize(
    ("peers", "now", "rank", "kind", "message"),
    [
        ([peer(0), peer(1)], 1001, None, "", ""),
        # A death goes before the failures that it causes.
        (
            [replace(FAILED, dead=[1]), peer(1, where="phase train of step 3")],
            *(1001, 1, "died", "rank 1 on n died in phase train of step 3"),
        ),
        # A failure waits for a word of all others.
        ([FAILED, peer(1)], 1001, None, "", ""),
        ([FAILED, peer(1, heard_at=ANSWERED)], 1009, None, "", ""),
        ([FAILED, peer(1, heard_at=ANSWERED + 0.1)], 1009, 0, "failed", "connection closed"),
        ([FAILED, peer(1)], 1060.1, 1, "silent", "no sign of life for 60 s"),
        # Of failures the first counts, and who has said why it fails did not just die.
        (
            [peer(0, failure=Failure(2, 1, "late")), peer(1, failure=Failure(1, 3, "first"))],
            *(1001, 1, "failed", "first"),
        ),
        (
            [
                peer(0, heard_at=1000.6, dead=[1]),
                peer(1, failure=Failure(1, 2, "no"), failed_at=1000),
            ],
            *(1001, 1, "failed", "no"),
        ),
        ([peer(0, heard_at=1060), peer(1)], 1060, None, "", ""),
        ([peer(0, heard_at=1060), peer(1)], 1060.1, 1, "silent", "no sign of life for 60 s"),
        # Of ranks that stand still the one furthest behind is named.
        (STILL, 1630, None, "", ""),
        (STILL, 1640, 1, "stuck", "in phase verify for 10.0 min"),
        # Who has left is not missed.
        (
            [peer(0, dead=[1]), peer(1, has_left=True, heard_at=0.0, entered_at=0.0)],
            1001,
            None,
            "",
            "",
        ),
    ],
)
def test_whose_fault_it_is(
    peers: list[Peer], now: float, rank: int | None, kind: str, message: str
) -> None:
    without_limit = find_failed_rank(peers, now, replace(LIMITS, hang_seconds=0))
    found = find_failed_rank(peers, now, LIMITS)
    assert without_limit == (None if kind == "stuck" else found)
    if rank is None or found is None:
        assert found is rank
        return
    assert (found.rank, found.kind) == (rank, kind) and message in found.message
    failed = peers[rank].failure
    assert found.code == (failed.code if failed else LOST)


QUICK = Limits(hang_seconds=5.0, silence_seconds=4.0)


def run_processes(behaviours: Sequence[str], said: Path) -> tuple[list[int], str]:
    """Exit codes, and what all wrote to standard error, which is the file `said`."""
    (port,) = free_ports()
    pids = []
    for rank in range(len(behaviours)):
        if not (pid := os.fork()):
            try:
                with said.open("a") as errors:
                    os.dup2(errors.fileno(), 2)
                sys.stderr = os.fdopen(2, "w", buffering=1)
                be_watched(rank, behaviours, port)
            finally:
                os._exit(17 if sys.exc_info()[0] else 0)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return codes, said.read_text()


def be_watched(rank: int, behaviours: Sequence[str], port: int) -> None:
    world_size, behaviour = len(behaviours), behaviours[rank]
    store = TCPStore("localhost", port, None, rank == 0, wait_for_workers=False)
    me = replace(this_process(rank), host=f"node{rank // 2}")
    store.set(f"process{rank}", json.dumps(asdict(me)))
    names = [f"process{other}" for other in range(world_size)]
    processes = [Process(**json.loads(text)) for text in store.multi_get(names)]
    job = Job(rank=rank, world_size=world_size, id="job", store=store)
    enter_phase("start", 0)  # the process is as old as the one that it was forked from
    watchdog = Watchdog(job, processes, QUICK, secret=b"of the job")
    enter_phase("rollout", 7)
    time.sleep(1.5)
    if behaviour == "spoil":
        spoil(store)
    elif "spoil" in behaviours:
        time.sleep(2)
    if behaviour in ("die", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if behaviour == "die" else signal.SIGSTOP)
    if behaviour in ("fail", "fall"):  # as the command line does
        time.sleep(0.1 * (behaviour == "fall"))
        code, message = (3, "not a number") if behaviour == "fail" else (1, "connection closed")
        diagnosis = watchdog.report(code, message)
        if diagnosis is None or diagnosis.rank == rank:
            print(f"error: {message}", file=sys.stderr, flush=True)
        os._exit(diagnosis.code if diagnosis else 1)
    if behaviour in ("leave", "spoil"):
        return watchdog.leave()
    if behaviour != "stuck":  # one that is stuck is behind the others
        enter_phase("train")
    time.sleep(60)


def spoil(store: TCPStore) -> None:
    """What somebody may do who connects to the store, whose keys it tells: other ends and words,
    with seals of another secret, of another key and of none; and keys deleted.
    """
    for name in ("failures", "ending"):
        store.set(f"watch_1/{name}", "no number")
    end = json.dumps(asdict(Diagnosis(rank=1, code=5, kind="failed", message="spoilt")))
    sealed = hmac.digest(b"another", f"watch_1/end {end}".encode(), "sha256").hex()
    for value in (end, f"{sealed} {end}", "nonsense", ""):
        store.set("watch_1/end", value)
        time.sleep(0.2)
    word = json.dumps(["phase spoilt", 1, 1e9, [1, 5, "spoilt"], False, [0, 1, 2]])
    for rank in range(4):
        store.set(f"watch_1/{(rank + 1) % 4}", store.get(f"watch_1/{rank}"))
        store.set(f"watch_1/{rank}", word)
        time.sleep(0.2)
        store.delete_key(f"watch_1/{rank}")


@pytest.mark.slow
@pytest.mark.parametrize("behaviour", ["leave", "fail"])
def test_a_stranger_in_the_store_changes_nothing(tmp_path: Path, behaviour: str) -> None:
    """Neither a job that ends well nor what is said of one that does not."""
    ended = run_processes(["spoil", *[behaviour] * 3], tmp_path / "said")
    assert ended == (([0] * 4, "") if behaviour == "leave" else ([3] * 4, "error: not a number\n"))


FAULTS = {  # exit code of the culprit and of the others; words of the message
    "die": (-9, 69, "died in phase rollout of step 7"),
    "stop": (-9, 69, "it was in phase rollout of step 7"),
    "stuck": (69, 69, "has been in phase rollout of step 7 for 0.1 min"),
    "fail": (3, 3, "not a number"),
}


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 3])
@pytest.mark.parametrize("behaviour", FAULTS)
def test_one_fault_ends_all_with_one_message(tmp_path: Path, behaviour: str, culprit: int) -> None:
    """On two nodes of two ranks. With the launcher's store: gloo/test_faults.py."""
    behaviours = ["well"] * 4
    behaviours[culprit] = behaviour
    ended, said = run_processes(behaviours, tmp_path / "said")
    own, others, words = FAULTS[behaviour]
    assert ended == [own if rank == culprit else others for rank in range(4)], said
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert words in line and (f"rank {culprit} on " in line or behaviour == "fail")


@pytest.mark.slow
def test_a_machine_that_is_lost_with_rank_0_is_told_of_by_a_rank_elsewhere(tmp_path: Path) -> None:
    ended, said = run_processes(["die", "die", "well", "well"], tmp_path / "said")
    assert ended == [-9, -9, 69, 69], said
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert "rank 0 on node0" in line


@pytest.mark.slow
def test_who_fails_of_a_death_does_not_speak(tmp_path: Path) -> None:
    """On two nodes: the death is known to the rank beside the dead one alone."""
    ended, said = run_processes(["fall", "well", "die", "fall"], tmp_path / "said")
    assert ended == [69, 69, -9, 69], said
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert lines == ["error: rank 2 on node1 died in phase rollout of step 7"]


def test_ranks_leave_in_peace(tmp_path: Path) -> None:
    assert run_processes(["leave"] * 4, tmp_path / "said") == ([0] * 4, "")
