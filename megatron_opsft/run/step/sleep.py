"""The trainer sleeps while the engine is awake, and the other way round."""

from collections.abc import Sequence

from megatron_opsft.records import Sample, SyncResult
from megatron_opsft.run.start.session import Session
from megatron_opsft.runtime.phase import Stopwatch

# The phase of a step in which copies of `train.offload` keep everything waiting.
_PHASE = "offload"


def wake_trainer(s: Session, watch: Stopwatch) -> None:
    """Bring back what the trainer gave up; the engine must sleep. Called by every rank."""
    if s.offload.is_used:
        with watch.phase(_PHASE):
            s.offload.wake()


def push(
    s: Session, version: int, samples: Sequence[Sample], watch: Stopwatch
) -> SyncResult:
    """Copy the weights to the engine (see `WeightSync.push`), while the trainer falls asleep.
    Called by every rank.
    """

    def sleep() -> None:
        if s.offload.is_used:
            with watch.phase(_PHASE):
                s.offload.sleep()

    s.offload.begin_sleep()
    return s.sync.push(version, samples, let_go=sleep)
