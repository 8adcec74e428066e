"""What drafts have saved in a batch, against one token of every response in each pass."""

from collections.abc import Callable, Sequence

from megatron_opsft.rollout.pass_costs import PassShape

Cost = Callable[[int, float], float]


class BatchSeconds:
    """Seconds of a batch under way."""

    def __init__(self, context: float) -> None:
        """context: tokens that attention reads for each row in the first pass."""
        self._context = context
        self._spent = 0.0
        self._plain: list[tuple[PassShape, int, float]] = []

    def spend(self, seconds: float) -> None:
        """On whatever, passes without drafts aside."""
        self._spent += seconds

    def note_plain(self, shape: PassShape, num_passes: int, seconds: float) -> None:
        """Passes without drafts took so long."""
        self._spent += seconds
        self._plain.append((shape, num_passes, seconds))

    def saved(self, lengths: Sequence[int], cost: Cost) -> float:
        """By an estimate, when responses of so many tokens are complete.

        cost: seconds of a pass without drafts over so many rows and so much context. It is taken in
        proportion alone: what such passes of this batch took says how much it is.
        """
        ended, plain = 0, 0.0
        for number, length in enumerate(sorted(lengths)):
            middle = self._context + (ended + length) / 2
            plain += (length - ended) * cost(len(lengths) - number, middle)
            ended = length
        timed = sum(seconds for _, _, seconds in self._plain)
        if expected := sum(cost(shape.live, shape.context) * n for shape, n, _ in self._plain):
            plain *= timed / expected
        return plain - self._spent
