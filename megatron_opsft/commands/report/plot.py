"""Coordinates of a page's pictures: where lines, dots, bars and texts are. The template draws them
as SVG.

A chart is 400 x 200 units large; all coordinates count from the upper left corner. Colours come
from the page's style. A screen reader reads the title and where each series begins and ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_opsft.commands.report.chart import (
    CLOUD_WIDTH,
    Axes,
    Bars,
    Chart,
    Cloud,
    Picture,
    Series,
    Tick,
)
from megatron_opsft.runtime.formatting import number

_WIDTH = 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 390, 12, 168  # edges of a chart's axes
_BAR_HEIGHT = 20  # with the gap to the next bar
_LETTER_WIDTH = 7.2  # on average; wide enough for any text
_FONT_SIZE = 12  # of all texts, as in page.css
_MAX_LABEL = 25  # characters beside a bar
_NUM_COLOURS = 7  # .c0 to .c6 in page.css


class Segment(NamedTuple):
    """A straight line from (x1, y1) to (x2, y2)."""

    x1: float
    x2: float
    y1: float
    y2: float


class Dot(NamedTuple):
    """A dot, and the text that is shown when a reader points at it."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedSeries:
    """A series of a chart."""

    style_index: int
    """Number of its colour in the page's style."""
    kind: str
    """`Series.kind`, which is also its class in the page's style."""
    label: str
    path: str
    """The curve as the `d` of an SVG path; "" for points that are not joined."""
    whiskers: Sequence[Segment]
    dots: Sequence[Dot]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedBar:
    """A bar, its label to the left, and its value to the right."""

    top: int
    begin: float
    """Left edge of the bar."""
    width: float
    whisker: Sequence[float]
    """Both ends; empty without a whisker."""
    end: float
    """Right edge of the bar or its whisker."""
    label: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedWord:
    """A word of a cloud."""

    style_index: int
    """Number of its colour in the page's style."""
    transform: str
    """SVG transform that moves and scales the word."""
    meaning: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A picture as the template draws it."""

    title: str
    description: str
    """What a screen reader reads."""
    note: str = ""
    """Stands below the picture."""
    width: int = _WIDTH
    height: float = 200
    x: str = ""
    """What the horizontal axis counts."""
    y_ticks: Sequence[Tick] = ()
    x_ticks: Sequence[Tick] = ()
    series: Sequence[PlacedSeries] = ()
    bars: Sequence[PlacedBar] = ()
    words: Sequence[PlacedWord] = ()


def place(picture: Picture) -> Drawing:
    """Return the picture with coordinates on the page."""
    if isinstance(picture, Cloud):
        return _place_words(picture)
    if isinstance(picture, Bars):
        return _place_bars(picture)
    return _place_chart(picture)


def _place_chart(chart: Chart) -> Drawing:
    axes = chart.axes()
    ends = "; ".join(_describe_ends(series, chart) for series in chart.series)
    return Drawing(
        title=chart.title,
        description=f"{chart.title}: {ends}",
        note=chart.note,
        x=chart.x,
        y_ticks=[tick._replace(at=_y(tick.at, axes)) for tick in axes.y_ticks],
        x_ticks=[tick._replace(at=_x(tick.at, axes)) for tick in axes.x_ticks],
        series=[_place_series(series, chart, axes) for series in chart.series],
    )


def _place_bars(chart: Bars) -> Drawing:
    """Leave as much room for labels and for values as the longest of them needs."""
    labels = []
    for row in chart.rows:
        is_short = len(row.label) <= _MAX_LABEL
        labels.append(row.label if is_short else f"{row.label[: _MAX_LABEL - 1]}…")
    label_letters = max(map(len, labels), default=0)
    value_letters = max((len(row.text) for row in chart.rows), default=0)
    begin = 8 + _LETTER_WIDTH * label_letters
    room = _WIDTH - begin - 6 - _LETTER_WIDTH * value_letters
    unit = room / (max((row.end for row in chart.rows), default=0) or 1)
    bars = []
    for index, (label, row) in enumerate(zip(labels, chart.rows, strict=True)):
        whisker = [end for end in (row.low, row.high) if end is not None]
        bars.append(
            PlacedBar(
                top=_BAR_HEIGHT * index,
                begin=begin,
                width=round(unit * row.value, 1),
                whisker=[round(begin + unit * end, 1) for end in whisker],
                end=round(begin + unit * row.end, 1),
                label=label,
                text=row.text,
            )
        )
    values = "; ".join(f"{row.label} {row.text}" for row in chart.rows)
    return Drawing(
        title=chart.title,
        description=f"{chart.title}: {values}",
        note=chart.note,
        height=_BAR_HEIGHT * len(bars) + 4,
        bars=bars,
    )


def _place_words(cloud: Cloud) -> Drawing:
    words = []
    for index, word in enumerate(cloud.words):
        scale = word.size / _FONT_SIZE
        words.append(
            PlacedWord(
                style_index=index % _NUM_COLOURS,
                transform=f"translate({word.x} {word.y}) scale({scale:.3f})",
                meaning=word.meaning,
                text=word.text,
            )
        )
    return Drawing(
        title=cloud.title,
        description=f"Largest first: {', '.join(word.text for word in cloud.words)}",
        note=cloud.note,
        width=CLOUD_WIDTH,
        height=cloud.height,
        words=words,
    )


def _x(along: float, axes: Axes) -> float:
    left, right = axes.x
    return round(_LEFT + (along - left) / (right - left) * (_RIGHT - _LEFT), 1)


def _y(value: float, axes: Axes) -> float:
    low, high = axes.y
    return round(_BOTTOM - (value - low) / (high - low or 1) * (_BOTTOM - _TOP), 1)


def _place_series(series: Series, chart: Chart, axes: Axes) -> PlacedSeries:
    points = series.thinned()
    has_dots = series.kind != "curve" or len(points) < 3
    prefix = f"{series.label}, " if series.label else ""
    joints = []
    dots = []
    for x, y in points:
        at_x, at_y = _x(chart.along(x), axes), _y(y, axes)
        joints.append(f"{at_x} {at_y}")
        if has_dots:
            text = f"{prefix}{chart.x} {number(x)}: {chart.show(y)}"
            dots.append(Dot(at_x, at_y, text))
    whiskers = []
    for whisker in series.vertical_whiskers:
        at = _x(chart.along(whisker.at), axes)
        whiskers.append(Segment(at, at, _y(whisker.low, axes), _y(whisker.high, axes)))
    for whisker in series.horizontal_whiskers:
        low, high = chart.along(whisker.low), chart.along(whisker.high)
        at = _y(whisker.at, axes)
        whiskers.append(Segment(_x(low, axes), _x(high, axes), at, at))
    return PlacedSeries(
        style_index=series.style_index % _NUM_COLOURS,
        kind=series.kind,
        label=series.label,
        path="" if series.kind == "points" else "M" + "L".join(joints),
        whiskers=whiskers,
        dots=dots,
    )


def _describe_ends(series: Series, chart: Chart) -> str:
    """Return the label, and the value at the first and at the last point."""
    ends = [
        f"{chart.show(y)} at {chart.x} {number(x)}"
        for x, y in (series.points[0], series.points[-1])
    ]
    return f"{series.label} {' to '.join(dict.fromkeys(ends))}".strip()
