"""Decides which rank of a job is at fault when one fails, dies, is silent or stands still.

Pure: it reads no clock and no store.
"""

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from megatron_opsft.records import record

PEER_LOST_EXIT_CODE = 69  # EX_UNAVAILABLE of sysexits.h; worth another start
SETTLE_SECONDS = 0.5  # a dead process may stay in the process table for so long


@record
class Limits:
    """How long a rank may stand still or be silent."""

    hang_seconds: float = 0.0
    """Longest time in one phase; 0: no limit."""
    silence_seconds: float = 60.0
    """Longest time without a sign of life."""

    @property
    def beat_seconds(self) -> float:
        """Seconds between two signs of life."""
        return min(2.0, self.silence_seconds / 8)


@record
class Diagnosis:
    """The rank that ended the job, and why."""

    rank: int
    code: int = PEER_LOST_EXIT_CODE
    """Exit code of every rank."""
    kind: str
    """failed: the rank reported an error; died: its process is gone; silent: it gave no sign of
    life; stuck: it stayed in one phase for more than hang_seconds.
    """
    message: str


class Failure(NamedTuple):
    """An error that a rank reported."""

    order: int
    """1 for the first rank of the job that failed, 2 for the second, ..."""
    code: int
    """Exit code."""
    message: str


@dataclass(slots=True, kw_only=True)
class Peer:
    """What a rank last said. Times are those of the clock of the rank that listens."""

    rank: int
    name: str
    heard_at: float
    """Time of the last message."""
    message: str = ""
    """The last message, in the form that `hear` reads."""
    where: str = "phase start"
    """The phase that the rank is in, with its step."""
    phase_number: int = 0
    """How many phases the rank has entered."""
    entered_at: float = 0.0
    """Time at which it entered its phase."""
    failure: Failure | None = None
    failed_at: float = 0.0
    """Time at which the failure was heard."""
    has_left: bool = False
    """True if the rank is done with the job and is not watched any more."""
    dead: Collection[int] = ()
    """Ranks of its machine whose processes have ended."""

    def hear(self, message: str, now: float) -> None:
        """Store what a new message says, a JSON list of where, phase_number, seconds in this phase,
        failure, has_left and dead.
        """
        self.message = message
        self.heard_at = now
        says = json.loads(message)
        self.where, self.phase_number, seconds, failure, self.has_left, self.dead = says
        self.entered_at = now - seconds
        if failure and not self.failure:
            self.failure = Failure(*failure)
            self.failed_at = now

    def found_dead(self) -> Diagnosis:
        """Return the diagnosis of a rank whose process is gone."""
        return Diagnosis(
            rank=self.rank, kind="died", message=f"{self.name} died in {self.where}"
        )

    def found_silent(self, limits: Limits) -> Diagnosis:
        """Return the diagnosis of a rank that gives no sign of life."""
        return Diagnosis(
            rank=self.rank,
            kind="silent",
            message=f"{self.name} has given no sign of life for {limits.silence_seconds:.0f} s; "
            f"it was in {self.where}",
        )


def find_failed_rank(
    peers: Iterable[Peer], now: float, limits: Limits
) -> Diagnosis | None:
    """Return the diagnosis of the rank that is at fault; None if no rank is, or none is yet.

    A dead or silent rank comes before a failed one, because the others fail as a consequence. So a
    failure counts only when all other ranks have been heard after it. Among several failures the
    first counts. Among ranks that stand still, the one furthest behind keeps the others waiting.
    """
    present = [peer for peer in peers if not peer.has_left]
    running = [peer for peer in present if not peer.failure]
    dead = set().union(*(peer.dead for peer in present))
    for peer in running:
        if peer.rank in dead:
            return peer.found_dead()
    for peer in sorted(running, key=lambda peer: peer.heard_at):
        if now - peer.heard_at > limits.silence_seconds:
            return peer.found_silent(limits)
    failures = [(peer.failure, peer) for peer in present if peer.failure]
    if failures:
        # By then a rank that has died shows: wait for what the others say after that.
        settled_at = min(peer.failed_at for _, peer in failures) + SETTLE_SECONDS
        if any(peer.heard_at <= settled_at for peer in running):
            return None
        failure, peer = min(failures, key=lambda pair: pair[0])  # by `order`
        return Diagnosis(
            rank=peer.rank, code=failure.code, kind="failed", message=failure.message
        )
    longest = max((now - peer.entered_at for peer in present), default=0.0)
    if not 0 < limits.hang_seconds < longest:
        return None
    furthest_behind = min(
        present, key=lambda peer: (peer.phase_number, peer.entered_at)
    )
    minutes = (now - furthest_behind.entered_at) / 60
    return Diagnosis(
        rank=furthest_behind.rank,
        kind="stuck",
        message=f"{furthest_behind.name} has been in {furthest_behind.where} for "
        f"{minutes:.1f} min without progress (run.hang_minutes); no rank is further behind",
    )
