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
class _Sums:
    """Of a regression of y on x in which later points count for more.

    kept: share of earlier ones that each new one leaves.
    """

    kept: float
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        self.weight = self.kept * self.weight + 1
        self.x = self.kept * self.x + x
        self.y = self.kept * self.y + y
        self.xx = self.kept * self.xx + x**2
        self.xy = self.kept * self.xy + x * y


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
        # Seconds of a row over context; seconds that drafts add to a pass over their tokens.
        self._plain: defaultdict[int, _Sums] = defaultdict(lambda: _Sums(_KEPT))
        self._drafts: defaultdict[int, _Sums] = defaultdict(lambda: _Sums(_MEMORY))

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
        return _line(self._plain[size], context) * num_rows

    def drafts(self, num_rows: int, context: float) -> tuple[float, float]:
        """Seconds that any drafts add to a pass, and those that each of their tokens does."""
        size = self._timed_size(num_rows)
        return _fixed_and_each(self._drafts[size], num_rows, self.plain(num_rows, context))

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


def _line(sums: _Sums, context: float) -> float:
    """Seconds at this context; they do not fall with it."""
    mean, middle = sums.y / sums.weight, sums.x / sums.weight
    spread = sums.xx / sums.weight - middle**2
    slope = (sums.xy / sums.weight - middle * mean) / (spread + _NEAR**2)
    return max(mean + max(slope, 0.0) * (context - middle), 0.1 * mean)


def _fixed_and_each(sums: _Sums, num_rows: int, plain: float) -> tuple[float, float]:
    """Seconds of the fixed part and of a token, by what was timed and what is expected at first."""
    first = _EACH * plain / num_rows
    prior = (_NOISE / _EACH_OFF * num_rows) ** 2
    weight = sums.weight + (_NOISE / _FIXED_OFF) ** 2
    xx, xy = sums.xx + prior, sums.xy + prior * first
    determinant = weight * xx - sums.x**2
    fixed = (sums.y * xx - sums.x * xy) / determinant
    each = (weight * xy - sums.x * sums.y) / determinant
    return max(fixed, 0.0), max(each, 0.01 * first)
