"""What a job's ranks were last heard to do, and who is at fault when one is not heard or stands
still. Pure: no clock, no store.
"""

import json
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
    code: int = PEER_LOST_EXIT_CODE
    kind: str
    message: str


@dataclass(slots=True, kw_only=True)
class Peer:
    """A rank as it was last heard; times are of the clock of whoever hears."""

    rank: int
    name: str
    heard: float
    word: str = ""  # the last one, as JSON
    where: str = "phase start"
    number: int = 0
    entered: float = 0.0
    failed: tuple[int, int, str] | None = (
        None  # its place among failures, exit code, message
    )
    failed_at: float = 0.0
    left: bool = False
    dead: Collection[int] = ()  # ranks of its machine whose processes have ended

    def understand(self, word: str, now: float) -> None:
        """It has said this."""
        self.word, self.heard = word, now
        self.where, self.number, age, failed, self.left, self.dead = json.loads(word)
        self.entered = now - age
        if failed and not self.failed:
            self.failed, self.failed_at = tuple(failed), now

    def describe_silence(self, limits: Limits) -> str:
        """The message when it is not heard."""
        silence = f"{limits.silence_seconds:.0f} s"
        return f"{self.name} has given no sign of life for {silence}; it was in {self.where}"


def find_failed_rank(
    peers: Iterable[Peer], now: float, limits: Limits
) -> Diagnosis | None:
    """Who is at fault, if anyone is.

    A death and a silence go before a failure, because the others fail of them: a failure counts
    when all others have been heard since. Of failures the first counts; of ranks that stand still,
    the one that is furthest behind keeps the others waiting.
    """
    present = [peer for peer in peers if not peer.left]
    failed = [(peer.failed, peer) for peer in present if peer.failed]
    running = [peer for peer in present if not peer.failed]
    dead = {rank for peer in present for rank in peer.dead}
    for peer in running:
        if peer.rank in dead:
            message = f"{peer.name} died in {peer.where}"
            return Diagnosis(rank=peer.rank, kind="died", message=message)
    for peer in sorted(running, key=lambda peer: peer.heard):
        if now - peer.heard > limits.silence_seconds:
            message = peer.describe_silence(limits)
            return Diagnosis(rank=peer.rank, kind="silent", message=message)
    if failed:
        settled = min(peer.failed_at for _, peer in failed) + SETTLE_SECONDS
        if any(peer.heard <= settled for peer in running):
            return None
        (_, code, message), first = min(failed, key=lambda each: each[0])
        return Diagnosis(rank=first.rank, code=code, kind="failed", message=message)
    if limits.hang_seconds and any(
        now - peer.entered > limits.hang_seconds for peer in present
    ):
        last = min(present, key=lambda peer: (peer.number, peer.entered))
        message = (
            f"{last.name} has been in {last.where} for {(now - last.entered) / 60:.1f} min without "
            "progress (run.hang_minutes); no rank is further behind"
        )
        return Diagnosis(rank=last.rank, kind="stuck", message=message)
    return None
