"""What a run tells code of the user's."""

from collections.abc import Mapping
from pathlib import Path


class Callback:
    """Override what you want to hear of; the rest does nothing.

    Called on rank 0 alone, between two pieces of the run's work, which wait for it. An error that
    it raises ends the run; what was written until then stays.
    """

    def on_step(self, metrics: Mapping[str, float | int]) -> None:
        """After each step; metrics: its line of metrics.jsonl (docs/results.md)."""

    def on_evaluation(self, metrics: Mapping[str, float | int]) -> None:
        """After each evaluation on held-out problems; metrics: its line of evals.jsonl."""

    def on_checkpoint(self, step: int, directory: Path) -> None:
        """When a checkpoint of the state after `step` updates is whole on disk, which may be some
        steps later.
        """
