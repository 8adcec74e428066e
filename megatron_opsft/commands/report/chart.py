"""What a chart shows: the one description from which the page's SVG (plot.py) and the figures
for papers (paper.py) are drawn.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megatron_opsft.runtime.formatting import number, percent

Point = tuple[float, float]
Interval = tuple[float, float, float]
CLOUD_WIDTH = 360  # about what a phone shows, so that there a unit is a pixel
_MOST_POINTS = 400  # of a series: more than there are pixels
_MOST_NAMED = 3  # labels that a note lists
_WHOLE = (1, 2, 5, 10)  # steps between ticks that are whole where values are
_LETTER, _GAP = 0.023, 0.024  # of a tick's text, as shares of the width of the axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line or points of a chart, in one colour."""

    label: str
    """Its name in the legend; "" for the only one."""
    place: int
    """Number of its colour, line style and marker."""
    points: Sequence[Point]
    kind: str = "curve"
    """"curve"; "held": dots joined by dots; or "points"."""
    intervals: Sequence[Interval] = ()
    """(x, low, high) of vertical whiskers."""
    across: Sequence[Interval] = ()
    """(y, low, high) of horizontal whiskers."""
    n: str = ""
    """What a point rests on, such as "256 responses in each of 24 steps"."""
    spread: str = ""
    """What its whiskers are, such as "95 % intervals"; "" without any."""

    def thinned(self) -> list[Point]:
        """As many points as can be seen, the first and the last among them."""
        every = max(1, math.ceil(len(self.points) / _MOST_POINTS))
        return [*self.points[:-1:every], self.points[-1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """Limits and ticks. x is the exponent of 2 on a logarithmic axis: `Chart.along` gives it."""

    x: Point
    y: Point
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Series over one horizontal axis."""

    name: str
    """Plain: its file is called so."""
    title: str
    y: str
    """What the vertical axis shows, with its unit."""
    series: Sequence[Series]
    """Each with at least one point."""
    x: str = "step"
    """What the horizontal axis counts."""
    show: Callable[[float], str] = number
    """How vertical values are written; a `percent` axis does not leave 0 to 100 %."""
    from_zero: bool = False
    log_x: bool = False
    remark: str = ""
    """What else a reader needs."""

    @property
    def note(self) -> str:
        """One line: what points rest on, and what whiskers are."""
        series = [(one.label, one.n, one.spread) for one in self.series]
        return describe(series, self.remark)

    def along(self, x: float) -> float:
        """Where a value stands on the horizontal axis."""
        return math.log2(x) if self.log_x else float(x)

    def axes(self) -> Axes:
        """Limits with some room around what is shown, and round ticks inside."""
        places = sorted({x for one in self.series for x, _ in one.points})
        xs = [
            *places,
            *(x for one in self.series for _, *both in one.across for x in both),
        ]
        ys = [y for one in self.series for _, y in one.points]
        ys += [y for one in self.series for _, *both in one.intervals for y in both]
        left, right = _padded([self.along(x) for x in xs], 0.03)
        low, high = _padded([0.0, *ys] if self.from_zero else ys, 0.08)
        is_share = self.show is percent
        if self.from_zero or is_share:
            low = max(low, 0.0)
        high = min(high, 1.0) if is_share else high
        x_ticks: list[tuple[float, str]] = []
        free = -math.inf
        for tick in places if self.log_x else _ticks(left, right, 6, _WHOLE):
            along, text = self.along(tick), number(tick)
            share = (along - left) / (right - left)
            if share > free:
                free = share + _LETTER * len(text) + _GAP
                x_ticks.append((along, text))
        y_ticks = [
            (y, self.show(y).replace(".0 %", " %"))
            for y in _ticks(low, high, 4, (1, 2, 2.5, 5, 10))
        ]
        return Axes(x=(left, right), y=(low, high), x_ticks=x_ticks, y_ticks=y_ticks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A row of `Bars`."""

    label: str
    value: float
    text: str
    """The value as it is written."""
    low: float | None = None
    """Lower end of its whisker; None without one."""
    high: float | None = None
    n: str = ""
    spread: str = ""
    """As in `Series`."""

    @property
    def end(self) -> float:
        """The end of the bar or of its whisker, whichever is further out."""
        return max(self.value, self.high or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """A horizontal bar a row, from 0."""

    name: str
    """Plain: its file is called so."""
    title: str
    x: str
    """What a bar's length is, with its unit."""
    rows: Sequence[Bar]
    remark: str = ""
    """What else a reader needs."""

    @property
    def note(self) -> str:
        """One line: what bars rest on, and what whiskers are."""
        return describe(
            [(row.label, row.n, row.spread) for row in self.rows], self.remark
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """A word of a cloud."""

    text: str
    x: float
    y: float
    """Middle of its baseline, in units of the cloud, from above."""
    size: float
    """Of its font, in units of the cloud."""
    room: float
    """How wide it may be, in units of the cloud."""
    said: str = ""
    """What it means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cloud:
    """Words in a picture of CLOUD_WIDTH x height units, the largest first."""

    name: str
    """Plain: its file is called so."""
    title: str
    words: Sequence[Word]
    height: float
    note: str = ""
    """What the words rest on."""


Picture = Chart | Bars | Cloud


def describe(series: Iterable[tuple[str, str, str]], remark: str = "") -> str:
    """n and whiskers in one line. series: label, n and spread of each."""
    series = list(series)
    n = _grouped([(label, one) for label, one, _ in series], "n = ")
    spread = _grouped([(label, one) for label, _, one in series], "")
    parts = [n, spread and f"whiskers: {spread}", remark]
    return "; ".join(filter(None, parts))


def _grouped(told: Sequence[tuple[str, str]], prefix: str) -> str:
    """Each text once, with the labels that it holds for where it does not hold for all."""
    groups: dict[str, list[str]] = {}
    for label, text in told:
        groups.setdefault(text, []).append(label)
    if len(groups) == 1:
        return "".join(f"{prefix}{text}" for text in groups if text)
    return "; ".join(
        f"{prefix}{text} ({_few(who)})" for text, who in groups.items() if text
    )


def _few(labels: Sequence[str]) -> str:
    named = [label for label in labels if label]
    if len(named) > _MOST_NAMED + 1:
        named = [*named[:_MOST_NAMED], f"{len(named) - _MOST_NAMED} more"]
    return " and ".join(filter(None, [", ".join(named[:-1]), *named[-1:]]))


def _padded(values: Sequence[float], share: float) -> Point:
    """Lowest and highest with a share of room on both sides; never the same."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = share * (high - low) or abs(low) * 0.1 or 0.5
    return low - room, high + room


def _ticks(
    low: float, high: float, count: int, factors: Sequence[float]
) -> list[float]:
    """Values inside, about `count` of them, a round step apart: a factor times a power of ten."""
    raw = (high - low) / count or 1.0
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in factors if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]
