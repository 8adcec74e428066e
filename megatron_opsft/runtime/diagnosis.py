"""What a job's ranks were last heard to do, and who is at fault when one is not heard or stands
still. Pure: no clock, no store.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

PEER_LOST_EXIT_CODE = 69  # EX_UNAVAILABLE of sysexits.h; worth another start
SETTLE_SECONDS = 0.5  # a dead process may be in the process table for so long


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """hang_seconds: in one phase (0: no limit); silence_seconds: without a sign of life."""

    hang_seconds: float = 0.0
    silence_seconds: float = 60.0

    @property
    def beat_seconds(self) -> float:
        """Between two signs of life."""
        return min(2.0, self.silence_seconds / 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Who ended the job and why, and the exit code of every rank.

    kind: `failed` says so itself; `died` and `silent` cannot, `stuck` would not know.
    """

    rank: int
    code: int
    kind: str
    message: str


@dataclass(slots=True, kw_only=True)
class Peer:
    """A rank as it was last heard; times are of the clock of whoever hears."""

    rank: int
    name: str
    heard: float
    where: str = "phase start"
    number: int = 0
    entered: float = 0.0
    failed: tuple[int, int, str] | None = None  # its place among failures, exit code, message
    failed_at: float = 0.0
    left: bool = False
    dead: Collection[int] = ()  # ranks of its machine whose processes have ended


def diagnose(peers: Iterable[Peer], now: float, limits: Limits) -> Diagnosis | None:
    """Who is at fault, if anyone is.

    A death and a silence go before a failure, because the others fail of them: a failure counts
    when all others have been heard since. Of failures the first counts; of ranks that stand still,
    the one that is furthest behind keeps the others waiting.
    """
    present = [peer for peer in peers if not peer.left]
    failed = [peer for peer in present if peer.failed]
    running = [peer for peer in present if not peer.failed]
    dead = {rank for peer in present for rank in peer.dead}
    for peer in running:
        if peer.rank in dead:
            return _lost(peer, "died", f"{peer.name} died in {peer.where}")
    for peer in sorted(running, key=lambda peer: peer.heard):
        if now - peer.heard > limits.silence_seconds:
            return _lost(peer, "silent", describe_silence(peer, limits))
    if failed:
        settled = min(peer.failed_at for peer in failed) + SETTLE_SECONDS
        if all(peer.heard > settled for peer in running):
            return _failed(min(failed, key=lambda peer: peer.failed or (0, 0, "")))
        return None
    if limits.hang_seconds and any(now - peer.entered > limits.hang_seconds for peer in present):
        return _stuck(min(present, key=lambda peer: (peer.number, peer.entered)), now)
    return None


def describe_silence(peer: Peer, limits: Limits) -> str:
    """The message about a rank that is not heard."""
    return (
        f"{peer.name} has given no sign of life for {limits.silence_seconds:.0f} s; it was in "
        f"{peer.where}"
    )


def _stuck(peer: Peer, now: float) -> Diagnosis:
    minutes = (now - peer.entered) / 60
    return _lost(
        peer,
        "stuck",
        f"{peer.name} has been in {peer.where} for {minutes:.1f} min without getting on "
        "(run.hang_minutes); no rank is further behind",
    )


def _lost(peer: Peer, kind: str, message: str) -> Diagnosis:
    return Diagnosis(rank=peer.rank, code=PEER_LOST_EXIT_CODE, kind=kind, message=message)


def _failed(peer: Peer) -> Diagnosis:
    assert peer.failed is not None
    _, code, message = peer.failed
    return Diagnosis(rank=peer.rank, code=code, kind="failed", message=message)
