"""The events of a run that a user's own code may act on."""

from collections.abc import Mapping
from pathlib import Path


class Callback:
    """Override the events you want; the others do nothing.

    Called on rank 0 alone, between two phases of the run, which waits for it. An error that a
    callback raises ends the run; files already written stay.
    """

    def on_step(self, metrics: Mapping[str, float | int]) -> None:
        """Called after each step; metrics: its line of metrics.jsonl (docs/results.md)."""

    def on_evaluation(self, metrics: Mapping[str, float | int]) -> None:
        """Called after each evaluation on held-out problems; metrics: its line of evals.jsonl."""

    def on_checkpoint(self, step: int, directory: Path) -> None:
        """Called when the checkpoint of the state after `step` updates is completely on disk, which
        may be some steps later.
        """
