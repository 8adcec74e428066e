"""Description of a chart, from which both the page's SVG (plot.py) and the figures for papers
(paper.py) are drawn.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from megatron_opsft.records import record
from megatron_opsft.runtime.formatting import number, percent

Point = tuple[float, float]
CLOUD_WIDTH = 360  # units; about the pixels of a phone's width: there a unit is a pixel
_MAX_POINTS = 400  # of a series: more than a chart has pixels
_MAX_LABELS = 3  # labels that a note lists
_WHOLE_STEPS = (1, 2, 5, 10)  # between ticks of whole numbers
_STEPS = (1, 2, 2.5, 5, 10)
_LETTER_SHARE = 0.023  # width of a letter of a tick's text over the width of the axes
_GAP_SHARE = 0.024  # the same for the gap between two ticks' texts


class Whisker(NamedTuple):
    """The interval around a point: a line along one of the axes."""

    x: Point
    """x of both ends."""
    y: Point
    """y of both ends."""
    cap: str = "_"
    """The sign at both ends: "_" along the vertical axis, "|" along the horizontal one."""


@record
class Series:
    """A line or points of a chart, in one colour."""

    label: str
    """Its name in the legend; "" for the only series."""
    style_index: int
    """Number of its colour, line style and marker, counted from 0."""
    points: Sequence[Point]
    """(x, y) in the order in which they are joined."""
    kind: str = "curve"
    """"curve": joined by a line; "held": dots joined by a dotted line; "points": not joined."""
    whiskers: Sequence[Whisker] = ()
    n: str = ""
    """How many observations a point stands for: "256 responses in each of 24 steps"."""
    spread: str = ""
    """What its whiskers show, such as "95 % intervals"; "" without whiskers."""

    def thinned(self) -> list[Point]:
        """Return every k-th point, so that at most about 400 remain, and the last one."""
        stride = max(1, math.ceil(len(self.points) / _MAX_POINTS))
        return [*self.points[:-1:stride], self.points[-1]]


class Axes(NamedTuple):
    """Limits and ticks of a chart. Horizontal values are those of `Chart.along`: exponents of 2 if
    the axis is logarithmic.
    """

    x: Point
    """(left, right) limits."""
    y: Point
    """(lower, upper) limits."""
    x_ticks: Mapping[float, str]
    """Position -> its label."""
    y_ticks: Mapping[float, str]


@record
class Chart:
    """Series over one horizontal axis."""

    name: str
    """Base name of its files: letters, digits and _."""
    title: str
    y: str
    """What the vertical axis shows, with its unit."""
    series: Sequence[Series]
    """Each has at least one point."""
    x: str = "step"
    """What the horizontal axis counts."""
    show: Callable[[float], str] = number
    """Formats vertical values; with `percent` the axis stays within 0 and 100 %."""
    from_zero: bool = False
    """Whether the vertical axis begins at 0."""
    log_x: bool = False
    """Whether the horizontal axis is logarithmic; its ticks are then the points'."""
    remark: str = ""
    """A last sentence of the note."""

    @property
    def note(self) -> str:
        """One line: how many observations points stand for, and what whiskers show."""
        return describe(((s.label, s.n, s.spread) for s in self.series), self.remark)

    def along(self, x: float) -> float:
        """Return the position of a value on the horizontal axis."""
        return math.log2(x) if self.log_x else float(x)

    def axes(self) -> Axes:
        """Return limits with some room around the points and whiskers, and round ticks inside."""
        xs: list[float] = []
        ys: list[float] = [0.0] if self.from_zero else []
        whisker_ends: list[float] = []
        for series in self.series:
            for x, y in series.points:
                xs.append(x)
                ys.append(y)
            for whisker in series.whiskers:
                whisker_ends += whisker.x
                ys += whisker.y
        left, right = _padded([self.along(x) for x in (*xs, *whisker_ends)], 0.03)
        low, high = _padded(ys, 0.08)
        is_share = self.show is percent
        if self.from_zero or is_share:
            low = max(low, 0.0)
        if is_share:
            high = min(high, 1.0)
        ticks = sorted(set(xs)) if self.log_x else _ticks(left, right, 6, _WHOLE_STEPS)
        if all(float(x).is_integer() for x in xs):  # between steps there is nothing
            ticks = [tick for tick in ticks if tick == int(tick)]
        return Axes(
            x=(left, right),
            y=(low, high),
            x_ticks=self._label_x(ticks, left, right),
            y_ticks={
                y: self.show(y).replace(".0 %", " %")
                for y in _ticks(low, high, 4, _STEPS)
            },
        )

    def _label_x(
        self, values: Iterable[float], left: float, right: float
    ) -> dict[float, str]:
        """Return position -> label of the ascending values, without labels that would overlap."""
        ticks = {}
        free_from = -math.inf  # where the last label ends, as a share of the width
        for x in values:
            along, text = self.along(x), number(x)
            share = (along - left) / (right - left)
            if share > free_from:
                free_from = share + _LETTER_SHARE * len(text) + _GAP_SHARE
                ticks[along] = text
        return ticks


@record
class Bar:
    """A row of `Bars`."""

    label: str
    value: float
    text: str
    """The formatted value."""
    interval: tuple[float, float] | None = None
    """Both ends of its whisker; None without a whisker."""
    n: str = ""
    """How many observations the bar stands for."""
    spread: str = ""
    """What its whisker shows."""
    parts: Sequence[float] = ()
    """Lengths of its coloured parts, from the left; they add up to `value`. Empty: one colour."""

    @property
    def end(self) -> float:
        """The end of the bar or of its whisker, whichever is further out."""
        return max(self.value, self.interval[1] if self.interval else 0.0)


@record
class Bars:
    """Horizontal bars that begin at 0, one below the other. `name` is as in `Chart`."""

    name: str
    title: str
    x: str
    """What a bar's length is, with its unit."""
    rows: Sequence[Bar]
    parts: Sequence[str] = ()
    """Names of the bars' parts; empty if they have none."""
    remark: str = ""
    """A last sentence of the note."""

    @property
    def note(self) -> str:
        """One line: how many observations bars stand for, and what whiskers show."""
        bars = ((row.label, row.n, row.spread) for row in self.rows)
        return describe(bars, self.remark)

    @property
    def longest(self) -> float:
        """The largest `Bar.end`; 1 if all are 0."""
        return max((row.end for row in self.rows), default=0.0) or 1.0


@record
class Word:
    """A word of a cloud. Positions are measured from the cloud's upper left corner, y downwards;
    all numbers are in the units of `Cloud`.
    """

    text: str
    x: float
    """Middle of the word."""
    y: float
    """Its baseline."""
    size: float
    """Font size."""
    room: float
    """How wide it may be."""
    meaning: str = ""
    """Shown when a reader points at it."""


@record
class Cloud:
    """Words in a picture of CLOUD_WIDTH x height units, the largest first. `name` is as in
    `Chart`.
    """

    name: str
    title: str
    words: Sequence[Word]
    height: float
    note: str = ""


Picture = Chart | Bars | Cloud


def describe(series: Iterable[tuple[str, str, str]], remark: str = "") -> str:
    """Return one line: how many observations the series stand for, and what whiskers show.

    series: label, n and spread of each series or bar.
    """
    counts, spreads = [], []
    for label, n, spread in series:
        counts.append((f"n = {n}" if n else "", label))
        spreads.append((spread, label))
    whiskers = _group_labels(spreads)
    if whiskers:
        whiskers = f"whiskers: {whiskers}"
    return "; ".join(filter(None, [_group_labels(counts), whiskers, remark]))


def _group_labels(pairs: Iterable[tuple[str, str]]) -> str:
    """Join the texts, each with its labels if there are several texts. The text "" is left out.

    pairs: text and label of each series.
    """
    labels_of: dict[str, list[str]] = defaultdict(list)
    for text, label in pairs:
        labels_of[text].append(label)
    if len(labels_of) == 1:
        return next(iter(labels_of))
    texts = [f"{text} ({_list_labels(labels_of[text])})" for text in labels_of if text]
    return "; ".join(texts)


def _list_labels(labels: Sequence[str]) -> str:
    """Return "a", "a and b", "a, b and c", or "a, b, c and 4 more"."""
    names = [label for label in labels if label]
    if len(names) > _MAX_LABELS + 1:
        names = [*names[:_MAX_LABELS], f"{len(names) - _MAX_LABELS} more"]
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _padded(values: Sequence[float], share: float) -> Point:
    """Return the lowest and highest value, moved apart by a share of their distance on both
    sides; never twice the same.
    """
    low, high = min(values, default=0.0), max(values, default=1.0)
    padding = share * (high - low)
    if padding == 0:  # all values are the same
        padding = 0.1 * abs(low) or 0.5
    return low - padding, high + padding


def _ticks(
    low: float, high: float, count: int, factors: Sequence[float]
) -> list[float]:
    """Return about `count` values between low and high, a round step apart: one of the ascending
    factors times a power of ten.
    """
    exact_step = (high - low) / count
    power = 10 ** math.floor(math.log10(exact_step))
    # The first round step that is as large, rounding errors aside.
    step = next(f * power for f in factors if f * power >= exact_step * 0.999)
    # A tick at a limit belongs to the axis even if rounding puts it just outside.
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]
