"""What forward passes cost, as they are timed: seconds of one without drafts, and of a draft token.

By power of two of rows. A row of a pass without drafts costs a fixed part and one for each token
that attention reads, so that what was timed early in a batch holds for later; a draft token is
taken to add always the same.
"""

from collections import defaultdict
from dataclasses import dataclass

_KEPT = 0.9  # of what was timed without drafts, at each new timing
_MEMORY = 0.98  # of what draft tokens have cost, after each forward pass
_NEAR = 32.0  # tokens of context: timings that lie closer together show no slope
_TRY = 0.3  # of a plain pass's cost of a row: what a draft token is taken to cost at first
_OUTLIER = 1.6  # times what was expected: a longer pass counts as one that took so long


@dataclass(slots=True)
class _Line:
    """Seconds over context, by least squares in which later timings count for more."""

    weight: float = 0.0
    context: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def add(self, context: float, seconds: float) -> None:
        self.weight = _KEPT * self.weight + 1
        self.context = _KEPT * self.context + context
        self.seconds = _KEPT * self.seconds + seconds
        self.squares = _KEPT * self.squares + context**2
        self.products = _KEPT * self.products + context * seconds

    def at(self, context: float) -> float:
        mean, middle = self.seconds / self.weight, self.context / self.weight
        spread = self.squares / self.weight - middle**2
        slope = (self.products / self.weight - middle * mean) / (spread + _NEAR**2)
        return max(mean + max(slope, 0.0) * (context - middle), 0.1 * mean)


@dataclass(frozen=True, slots=True)
class PassShape:
    """rows: of a pass, those that have ended included; live: those that go on; context: tokens that
    attention reads for a row, of the longest or on average, but always the same.
    """

    rows: int
    live: int
    context: float


class PassCosts:
    """Of one engine; num_rows, context: as of a `PassShape`."""

    def __init__(self) -> None:
        self._plain: defaultdict[int, _Line] = defaultdict(_Line)  # of a row
        self._draft: dict[int, tuple[float, float]] = {}  # the two sums of a regression

    def is_timed(self, num_rows: int) -> bool:
        """Whether there was a pass without drafts over about so many rows."""
        return num_rows.bit_length() in self._plain

    def plain(self, num_rows: int, context: float) -> float:
        """Seconds of a pass without drafts; where none was timed, as with the next number of rows.
        Some must have been.
        """
        size = self._timed_size(num_rows)
        if size != num_rows.bit_length():
            num_rows = 2 ** (size - 1)
        return self._plain[size].at(context) * num_rows

    def draft(self, num_rows: int, context: float) -> float:
        """Seconds that a draft token adds."""
        size = self._timed_size(num_rows)
        products, squares = self._draft.get(size, (0.0, 0.0))
        first = _TRY * self._plain[size].at(context)
        return max((products + first) / (squares + 1), 0.01 * first)

    def note_plain(self, num_rows: int, context: float, seconds: float) -> None:
        """A pass without drafts took so long."""
        if self.is_timed(num_rows):
            seconds = min(seconds, _OUTLIER * self.plain(num_rows, context))
        self._plain[num_rows.bit_length()].add(context, seconds / num_rows)

    def note_drafts(self, shape: PassShape, num_drafted: int, seconds: float) -> float:
        """A pass with so many draft tokens took so long; what it counts for."""
        size = self._timed_size(shape.rows)  # rows may have left since their drafts were chosen
        plain = self.plain(shape.rows, shape.context)
        expected = plain + self.draft(shape.rows, shape.context) * num_drafted
        seconds = min(seconds, _OUTLIER * expected)
        products, squares = self._draft.get(size, (0.0, 0.0))
        self._draft[size] = (
            _MEMORY * products + (seconds - plain) * num_drafted,
            _MEMORY * squares + num_drafted**2,
        )
        return seconds

    def _timed_size(self, num_rows: int) -> int:
        """The power of two of rows, or the next one of which a pass was timed."""
        return min(self._plain, key=lambda size: abs(size - num_rows.bit_length()))
