"""The watchdog: whose fault it is, and that all processes end with one message, whoever fails."""

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_opsft.runtime.diagnosis import (
    PEER_LOST_EXIT_CODE,
    SETTLE_SECONDS,
    Diagnosis,
    Limits,
    Peer,
    Process,
    diagnose,
    listeners,
)
from megatron_opsft.runtime.job_watchdog import open_listener
from megatron_opsft.runtime.watch_server import WatchServer

LIMITS = Limits(hang_seconds=600, silence_seconds=60)
SCRIPT = Path(__file__).parents[1] / "support/watched_process.py"


def peer(rank: int, **known: object) -> Peer:
    process = Process(rank=rank, host=f"node{rank}", pid=1, started=0.0)
    return replace(Peer(process=process, heard=1000.0, entered=990.0), **known)


def diagnosis(*peers: Peer, now: float = 1001.0, limits: Limits = LIMITS) -> Diagnosis | None:
    return diagnose(peers, now, limits)


def test_healthy_ranks_are_left_alone() -> None:
    assert diagnosis(peer(0), peer(1)) is None


def test_a_death_goes_before_the_failures_it_causes() -> None:
    failed = peer(0, failed=(999.9, 1, "connection closed"))
    died = peer(1, lost=1000.0, where="phase train of step 3")
    found = diagnosis(failed, died)
    assert found == Diagnosis(
        rank=1,
        code=PEER_LOST_EXIT_CODE,
        kind="died",
        message="rank 1 on node1 died in phase train of step 3",
    )


def test_nothing_is_judged_before_all_have_had_a_moment_to_be_heard() -> None:
    failed = peer(0, failed=(1000.9, 1, "connection closed"))
    assert diagnosis(failed, peer(1)) is None
    assert diagnosis(failed, peer(1), now=1000.9 + SETTLE_SECONDS) is not None


def test_of_failures_the_first_counts_with_its_exit_code() -> None:
    found = diagnosis(peer(0, failed=(1000.2, 1, "late")), peer(1, failed=(1000.1, 3, "first")))
    assert found is not None
    assert (found.rank, found.code, found.kind, found.message) == (1, 3, "failed", "first")


def test_who_has_said_why_it_fails_did_not_just_die() -> None:
    found = diagnosis(peer(0), peer(1, failed=(1000.0, 2, "wrong"), lost=1000.1))
    assert found is not None and (found.kind, found.code) == ("failed", 2)


def test_silence_is_counted_from_the_last_sign_of_life() -> None:
    assert diagnosis(peer(0, heard=1060), peer(1), now=1060.0) is None
    found = diagnosis(peer(0, heard=1060), peer(1), now=1060.1)
    assert found is not None and (found.rank, found.kind) == (1, "silent")
    assert "rank 1 on node1 has given no sign of life for 60 s" in found.message


def test_of_ranks_that_stand_still_the_one_furthest_behind_is_named() -> None:
    ranks = [peer(r, heard=1640, entered=1030.0, number=8, where="phase train") for r in range(3)]
    ranks[1] = peer(1, heard=1640, entered=1039.0, number=7, where="phase verify")
    assert diagnosis(*ranks, now=1630.0) is None
    found = diagnosis(*ranks, now=1640.0)
    assert found is not None and (found.rank, found.kind) == (1, "stuck")
    assert "in phase verify for 10.0 min" in found.message
    assert diagnosis(*ranks, now=1640.0, limits=replace(LIMITS, hang_seconds=0)) is None


def test_who_has_left_is_not_missed() -> None:
    assert diagnosis(peer(0), peer(1, left=True, heard=0.0, entered=0.0, lost=1000.0)) is None


def test_of_each_node_one_rank_is_connected_to_rank_0() -> None:
    hosts = ["a", "b", "b", "a", "c", "c"]  # ranks 0 to 5
    processes = [
        Process(rank=rank, host=host, pid=1, started=0.0) for rank, host in enumerate(hosts)
    ]
    assert listeners(processes[::-1]) == {0: 0, 1: 0, 2: 1, 3: 0, 4: 0, 5: 4}


def test_who_is_heard_through_a_silent_rank_is_not_silent() -> None:
    first = peer(1, heard=1060)
    passed_on = peer(2, heard=1000, through=first)
    assert diagnosis(peer(0, heard=1100), first, passed_on, now=1120.0) is None
    found = diagnosis(peer(0, heard=1100), first, passed_on, now=1120.1)
    assert found is not None and (found.rank, found.kind) == (1, "silent")
    first.heard = 1060.1
    found = diagnosis(peer(0, heard=1100), first, passed_on, now=1061.0)
    assert found is not None and (found.rank, found.kind) == (2, "silent")


def run_processes(
    directory: Path, behaviours: list[str], ranks_on_node: int
) -> tuple[list[int], str, float]:
    """Exit codes, what all wrote to standard error, and seconds until the last has ended."""
    begin = time.monotonic()
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, str(SCRIPT), str(rank), str(len(behaviours)), str(directory)),
                *(what, str(ranks_on_node)),
            ],
            stderr=subprocess.PIPE,
            text=True,
            cwd=SCRIPT.parents[2],
            env={"PYTHONPATH": str(SCRIPT.parents[2])},
        )
        for rank, what in enumerate(behaviours)
    ]
    said = "".join(process.communicate(timeout=30)[1] for process in processes)
    return [process.returncode for process in processes], said, time.monotonic() - begin


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 2, 3])
@pytest.mark.parametrize(
    ("behaviour", "codes", "words"),
    [
        ("die", (-9, 69), "died in phase rollout of step 7"),
        ("stop", (-9, 69), "it was in phase rollout of step 7"),
        ("stuck", (69, 69), "has been in phase rollout of step 7 for 0.1 min"),
        ("fail", (3, 3), "not a number"),
    ],
)
def test_one_fault_ends_all_with_one_message(
    tmp_path: Path, behaviour: str, codes: tuple[int, int], words: str, culprit: int
) -> None:
    """On two nodes of two ranks: rank 2 passes on what rank 3 says."""
    behaviours = ["well"] * 4
    behaviours[culprit] = behaviour
    ended, said, seconds = run_processes(tmp_path, behaviours, ranks_on_node=2)
    assert ended == [codes[0] if rank == culprit else codes[1] for rank in range(4)]
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert words in line
    assert f"rank {culprit} on " in line or behaviour == "fail"
    assert seconds < 15


@pytest.mark.parametrize("ranks_on_node", [4, 2])
def test_ranks_leave_in_peace(tmp_path: Path, ranks_on_node: int) -> None:
    assert run_processes(tmp_path, ["leave"] * 4, ranks_on_node)[:2] == ([0] * 4, "")


@pytest.fixture
def server() -> Iterator[tuple[WatchServer, tuple[str, int]]]:
    """Of two ranks that have not come yet, and where it listens."""
    listener = open_listener("localhost", one_node=True)
    processes = [Process(rank=rank, host="here", pid=1, started=0.0) for rank in range(2)]
    watching = WatchServer(processes, "secret", listener, LIMITS, lambda diagnosis: None)
    address = listener.getsockname()[:2]
    yield watching, address
    for rank in range(2):
        with socket.create_connection(address) as connection:
            greeting = {"token": "secret", "rank": rank}
            lines = [greeting, {"bye": True}]
            connection.sendall(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    watching._thread.join(10)
    assert not watching._thread.is_alive() and watching.diagnosis is None


@pytest.mark.parametrize(
    "noise",
    [
        b"[" * 200_000 + b"\n",
        b"x" * 100_000,
        b'{"token": "secret", "rank": 7}\n',
        b'{"token": "guess", "rank": 0}\n',
        b"[1]\n7\n",
        b"\xff\xfe\n",
    ],
    ids=["deep", "endless", "no-rank", "wrong-token", "no-object", "no-text"],
)
def test_a_stranger_is_sent_away_and_ends_nothing(
    server: tuple[WatchServer, tuple[str, int]], noise: bytes
) -> None:
    watching, address = server
    with socket.create_connection(address, timeout=10) as stranger:
        with contextlib.suppress(OSError):  # sent away before all was said
            stranger.sendall(noise)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert watching._thread.is_alive()


def test_listener_is_at_the_job_s_address_alone() -> None:
    with open_listener("127.0.0.1", one_node=True) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    with open_listener("127.0.0.1", one_node=False) as everywhere:
        assert everywhere.getsockname()[0] in ("::", "0.0.0.0")
    with open_listener("203.0.113.7", one_node=True) as elsewhere:  # not this machine's
        assert elsewhere.getsockname()[0] in ("::", "0.0.0.0")
