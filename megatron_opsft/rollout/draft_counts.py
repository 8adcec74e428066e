"""What drafts have brought: counts of an engine, and the metrics of a step."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass


@dataclass(slots=True)
class DraftCounts:
    """rows: of all forward passes, so one over eight responses under way counts eight;
    saved_seconds: an estimate, by what passes without drafts took.
    """

    rows: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    saved_seconds: float = 0.0

    def figures(self) -> dict[str, float]:
        """Metrics of a step."""
        return {
            "draft_length": self.drafted / max(self.rows, 1),
            "draft_acceptance": self.accepted / max(self.drafted, 1),
            "draft_pass_tokens": self.tokens / max(self.rows, 1),
            "draft_saved_seconds": self.saved_seconds,
        }


def sum_counts(parts: Iterable[DraftCounts]) -> DraftCounts:
    """Of all engines together."""
    return DraftCounts(*(sum(column) for column in zip(*map(astuple, parts), strict=True)))
