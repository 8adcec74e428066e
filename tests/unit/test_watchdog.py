"""The watchdog: whose fault it is, and that all processes end with one message, whoever fails."""

from dataclasses import replace
from pathlib import Path

import pytest
from watched_processes import run_processes

from megatron_opsft.runtime.diagnosis import (
    PEER_LOST_EXIT_CODE,
    SETTLE_SECONDS,
    Diagnosis,
    Limits,
    Peer,
    diagnose,
)

LIMITS = Limits(hang_seconds=600, silence_seconds=60)


def peer(rank: int, **known: object) -> Peer:
    return replace(Peer(rank=rank, name=f"rank {rank} on n", heard=1000.0, entered=990.0), **known)


def diagnosis(*peers: Peer, now: float = 1001.0, limits: Limits = LIMITS) -> Diagnosis | None:
    return diagnose(peers, now, limits)


def test_healthy_ranks_are_left_alone() -> None:
    assert diagnosis(peer(0), peer(1)) is None


def test_a_death_goes_before_the_failures_it_causes() -> None:
    failed = peer(0, failed=(1, 1, "connection closed"), failed_at=999.0, dead=[1])
    died = peer(1, where="phase train of step 3")
    found = diagnosis(failed, died)
    assert found == Diagnosis(
        rank=1,
        code=PEER_LOST_EXIT_CODE,
        kind="died",
        message="rank 1 on n died in phase train of step 3",
    )


def test_a_failure_waits_for_a_word_of_all_others() -> None:
    failed = peer(0, failed=(1, 1, "connection closed"), failed_at=1000.9)
    assert diagnosis(failed, peer(1)) is None
    heard = 1000.9 + SETTLE_SECONDS
    assert diagnosis(failed, peer(1, heard=heard), now=1009.0) is None
    assert diagnosis(failed, peer(1, heard=heard + 0.1), now=1009.0) is not None
    found = diagnosis(failed, peer(1), now=1060.1)
    assert found is not None and (found.rank, found.kind) == (1, "silent")


def test_of_failures_the_first_counts_with_its_exit_code() -> None:
    found = diagnosis(peer(0, failed=(2, 1, "late")), peer(1, failed=(1, 3, "first")))
    assert found is not None
    assert (found.rank, found.code, found.kind, found.message) == (1, 3, "failed", "first")


def test_who_has_said_why_it_fails_did_not_just_die() -> None:
    found = diagnosis(peer(0, heard=1000.6, dead=[1]), peer(1, failed=(1, 2, "no"), failed_at=1000))
    assert found is not None and (found.kind, found.code) == ("failed", 2)


def test_silence_is_counted_from_the_last_sign_of_life() -> None:
    assert diagnosis(peer(0, heard=1060), peer(1), now=1060.0) is None
    found = diagnosis(peer(0, heard=1060), peer(1), now=1060.1)
    assert found is not None and (found.rank, found.kind) == (1, "silent")
    assert "rank 1 on n has given no sign of life for 60 s" in found.message


def test_of_ranks_that_stand_still_the_one_furthest_behind_is_named() -> None:
    ranks = [peer(r, heard=1640, entered=1030.0, number=8, where="phase train") for r in range(3)]
    ranks[1] = peer(1, heard=1640, entered=1039.0, number=7, where="phase verify")
    assert diagnosis(*ranks, now=1630.0) is None
    found = diagnosis(*ranks, now=1640.0)
    assert found is not None and (found.rank, found.kind) == (1, "stuck")
    assert "in phase verify for 10.0 min" in found.message
    assert diagnosis(*ranks, now=1640.0, limits=replace(LIMITS, hang_seconds=0)) is None


def test_who_has_left_is_not_missed() -> None:
    assert diagnosis(peer(0, dead=[1]), peer(1, left=True, heard=0.0, entered=0.0)) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("culprit", "server"), [(0, "rank0"), (2, "rank0"), (3, "rank0"), (0, "launcher")]
)
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
    tmp_path: Path,
    behaviour: str,
    codes: tuple[int, int],
    words: str,
    culprit: int,
    server: str,
) -> None:
    """On two nodes of two ranks."""
    behaviours = ["well"] * 4
    behaviours[culprit] = behaviour
    ended = run_processes(behaviours, 2, server, tmp_path / "said")
    said = (tmp_path / "said").read_text()
    assert ended == [codes[0] if rank == culprit else codes[1] for rank in range(4)], said
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert words in line
    assert f"rank {culprit} on " in line or behaviour == "fail"


@pytest.mark.slow
def test_who_fails_of_a_death_does_not_speak(tmp_path: Path) -> None:
    """On two nodes: the death is known to the rank beside the dead one alone."""
    ended = run_processes(["fall", "well", "die", "fall"], 2, "rank0", tmp_path / "said")
    said = (tmp_path / "said").read_text()
    assert ended == [69, 69, -9, 69], said
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert line == "error: rank 2 on node1 died in phase rollout of step 7"


@pytest.mark.parametrize("server", ["rank0", "launcher"])
def test_ranks_leave_in_peace(tmp_path: Path, server: str) -> None:
    assert run_processes(["leave"] * 4, 2, server, tmp_path / "said") == [0] * 4
    assert (tmp_path / "said").read_text() == ""
