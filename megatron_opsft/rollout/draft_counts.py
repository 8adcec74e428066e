"""What drafts have brought: counts of an engine, and the metrics of a step."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class DraftCounts:
    """rows: of all forward passes, so one over eight responses under way counts eight;
    saved_seconds: an estimate, by what passes without drafts took; has_estimate: whether there are
    such passes; stopped: engines whose drafts did not pay and will be no more.
    """

    rows: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    saved_seconds: float = 0.0
    has_estimate: bool = True
    stopped: int = 0

    def figures(self) -> dict[str, float]:
        """Metrics of a step."""
        found = {
            "draft_length": self.drafted / max(self.rows, 1),
            "draft_acceptance": self.accepted / max(self.drafted, 1),
            "draft_pass_tokens": self.tokens / self.rows if self.rows else 1.0,
        }
        if self.has_estimate:
            found["draft_saved_seconds"] = self.saved_seconds
        return found


def say_if_stopped(counts: DraftCounts) -> None:
    """A line in the log where a draft model has been turned off, with what it brought."""
    if counts.stopped:
        _log.info(
            "rollout.draft_model: %.2f tokens a pass (%.0f%% of its tokens accepted) do not pay: "
            "off from here on in %d engine(s); leave it out, or give one that was trained for "
            "this model",
            counts.tokens / max(counts.rows, 1),
            100 * counts.accepted / max(counts.drafted, 1),
            counts.stopped,
        )


def sum_counts(parts: Sequence[DraftCounts]) -> DraftCounts:
    """Of all engines together."""
    return DraftCounts(
        rows=sum(part.rows for part in parts),
        tokens=sum(part.tokens for part in parts),
        drafted=sum(part.drafted for part in parts),
        accepted=sum(part.accepted for part in parts),
        saved_seconds=sum(part.saved_seconds for part in parts),
        has_estimate=all(part.has_estimate for part in parts),
        stopped=sum(part.stopped for part in parts),
    )
