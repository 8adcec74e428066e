"""What a job's ranks were last heard to do, and who is at fault when one is not heard or stands
still. Pure: no clock, no sockets.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PEER_LOST_EXIT_CODE = 69  # EX_UNAVAILABLE of sysexits.h; worth another start
SETTLE_SECONDS = 0.5  # one fault shows in many ranks: so long after the first sign it is diagnosed


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A rank's process; `started`, as of `started_at`, tells it from a later one of its id."""

    rank: int
    host: str
    pid: int
    started: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """hang_seconds: in one phase (0: no limit); silence_seconds: without a sign of life."""

    hang_seconds: float
    silence_seconds: float

    @property
    def beat_seconds(self) -> float:
        """Between two signs of life."""
        return min(5.0, self.silence_seconds / 8)


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
    """A rank as it was last heard; times are of the clock of whoever hears.

    through: the rank that passes on what it says; None where nobody has to.
    """

    process: Process
    heard: float
    through: "Peer | None" = None
    where: str = "phase start"
    number: int = 0
    entered: float = 0.0
    lost: float | None = None  # its connection closed without a farewell
    failed: tuple[float, int, str] | None = None  # when, exit code, message
    left: bool = False

    @property
    def name(self) -> str:
        return f"rank {self.process.rank} on {self.process.host}"


def listeners(processes: Sequence[Process]) -> dict[int, int]:
    """Of each rank, the one that hears what it does: rank 0 of its own node and of the first rank
    of every other node, and that one of the rest of its node.
    """
    first: dict[str, int] = {}
    for process in sorted(processes, key=lambda process: process.rank):
        first.setdefault(process.host, process.rank)
    leaders = {process.rank: first[process.host] for process in processes}
    return {rank: 0 if rank == leader else leader for rank, leader in leaders.items()}


def diagnose(peers: Iterable[Peer], now: float, limits: Limits) -> Diagnosis | None:
    """Who is at fault, if anyone is.

    A death goes before a failure, because the others fail of it; then the first in time. Of ranks
    that stand still, the one that is furthest behind keeps the others waiting.
    """
    present = [peer for peer in peers if not peer.left]
    lost = {peer.lost: peer for peer in present if peer.lost is not None and not peer.failed}
    failed = {peer.failed[0]: peer for peer in present if peer.failed}
    if signs := [*lost, *failed]:
        if now - min(signs) < SETTLE_SECONDS:
            return None
        return _died(lost[min(lost)]) if lost else _failed(failed[min(failed)])
    for peer in sorted(present, key=lambda peer: peer.heard):
        # Who is heard through another is not silent because that one is.
        until = peer.through.heard if peer.through else now
        if until - peer.heard > limits.silence_seconds:
            return _silent(peer, limits)
    if limits.hang_seconds and any(now - peer.entered > limits.hang_seconds for peer in present):
        return _stuck(min(present, key=lambda peer: (peer.number, peer.entered)), now)
    return None


def _died(peer: Peer) -> Diagnosis:
    return _lost(peer, "died", f"{peer.name} died in {peer.where}")


def _silent(peer: Peer, limits: Limits) -> Diagnosis:
    return _lost(
        peer,
        "silent",
        f"{peer.name} has given no sign of life for {limits.silence_seconds:.0f} s "
        f"(run.silence_seconds); it was in {peer.where}",
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
    return Diagnosis(rank=peer.process.rank, code=PEER_LOST_EXIT_CODE, kind=kind, message=message)


def _failed(peer: Peer) -> Diagnosis:
    assert peer.failed is not None
    _, code, message = peer.failed
    return Diagnosis(rank=peer.process.rank, code=code, kind="failed", message=message)
