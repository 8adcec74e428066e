"""What forward passes cost, as they are timed: seconds of one without drafts, and what drafts add.

By power of two of rows. A row of a pass without drafts costs a fixed part and one for each token
that attention reads, so that what was timed early in a batch holds for later. Drafts add a fixed
part, as attention of several queries to a row takes longer than that of one, and one for each of
their tokens.
"""

from collections import defaultdict
from dataclasses import dataclass

_KEPT = 0.9  # of what was timed without drafts, at each new timing
_MEMORY = 0.98  # of what drafts have cost, after each pass with some
_NEAR = 32.0  # tokens of context: timings that lie closer together show no slope
# What is expected of drafts at first: a token costs so much of a row of a pass without, the fixed
# part nothing. How much a timing and either of these may be off, in shares of such a row or pass.
_EACH, _NOISE, _FIXED_OFF, _EACH_OFF = 0.3, 0.05, 0.5, 0.1
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


@dataclass(slots=True)
class _Plane:
    """What drafts add to a pass, over their tokens: sums of a regression with a prior."""

    passes: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def add(self, num_drafted: int, seconds: float) -> None:
        self.passes = _MEMORY * self.passes + 1
        self.tokens = _MEMORY * self.tokens + num_drafted
        self.seconds = _MEMORY * self.seconds + seconds
        self.squares = _MEMORY * self.squares + num_drafted**2
        self.products = _MEMORY * self.products + num_drafted * seconds

    def solve(self, num_rows: int, plain: float) -> tuple[float, float]:
        """Seconds of the fixed part and of a token."""
        first = _EACH * plain / num_rows
        prior = (_NOISE / _EACH_OFF * num_rows) ** 2
        passes = self.passes + (_NOISE / _FIXED_OFF) ** 2
        squares, products = self.squares + prior, self.products + prior * first
        determinant = passes * squares - self.tokens**2
        fixed = (self.seconds * squares - self.tokens * products) / determinant
        each = (passes * products - self.tokens * self.seconds) / determinant
        return max(fixed, 0.0), max(each, 0.01 * first)


class PassCosts:
    """Of one engine; num_rows, context: as of a `PassShape`."""

    def __init__(self) -> None:
        self._plain: defaultdict[int, _Line] = defaultdict(_Line)  # of a row
        self._drafts: defaultdict[int, _Plane] = defaultdict(_Plane)

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

    def drafts(self, num_rows: int, context: float) -> tuple[float, float]:
        """Seconds that any drafts add to a pass, and those that each of their tokens does."""
        size = self._timed_size(num_rows)
        return self._drafts[size].solve(num_rows, self.plain(num_rows, context))

    def forget_drafts(self, num_rows: int) -> None:
        """After a pause, so that a new trial may show something else."""
        self._drafts.pop(self._timed_size(num_rows), None)

    def note_plain(self, num_rows: int, context: float, seconds: float) -> None:
        """A pass without drafts took so long."""
        if self.is_timed(num_rows):
            seconds = min(seconds, _OUTLIER * self.plain(num_rows, context))
        self._plain[num_rows.bit_length()].add(context, seconds / num_rows)

    def note_drafts(self, shape: PassShape, num_drafted: int, seconds: float) -> None:
        """A pass with so many draft tokens took so long."""
        size = self._timed_size(shape.rows)  # rows may have left since their drafts were chosen
        plain = self.plain(shape.rows, shape.context)
        self._drafts[size].add(num_drafted, self.clipped(shape, num_drafted, seconds) - plain)

    def clipped(self, shape: PassShape, num_drafted: int, seconds: float) -> float:
        """What a pass with drafts that took so long counts for."""
        fixed, each = self.drafts(shape.rows, shape.context)
        plain = self.plain(shape.rows, shape.context)
        return min(seconds, _OUTLIER * (plain + fixed + each * num_drafted))

    def _timed_size(self, num_rows: int) -> int:
        """The power of two of rows, or the next one of which a pass was timed."""
        return min(self._plain, key=lambda size: abs(size - num_rows.bit_length()))
