"""Coordinates of a page's pictures: where lines, dots, bars and texts are. The template draws them
as SVG.

A chart is 400 x 200 units large; all coordinates count from the upper left corner. Colours come
from the page's style. A screen reader reads the title and where each series begins and ends.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from megatron_opsft.commands.report.chart import (
    CLOUD_WIDTH,
    Axes,
    Bar,
    Bars,
    Chart,
    Cloud,
    Picture,
    Series,
    Whisker,
)
from megatron_opsft.runtime.formatting import number

_WIDTH = 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 390, 12, 168  # edges of a chart's axes
_LETTER_WIDTH = 7.2  # on average; wide enough for any text
_MAX_LABEL = 25  # characters beside a bar
_BAR_HEIGHT = 20  # with the gap to the next bar; as in the template


class Dot(NamedTuple):
    """A dot, and the text that is shown when a reader points at it."""

    x: float
    y: float
    text: str


class PlacedSeries(NamedTuple):
    """A series and its coordinates."""

    series: Series
    path: str
    """The curve as the `d` of an SVG path; "" for points that are not joined."""
    whiskers: Sequence[Whisker]
    dots: Sequence[Dot]


class PlacedPart(NamedTuple):
    """A part of a bar, and the text that is shown when a reader points at it."""

    begin: float
    width: float
    text: str


class PlacedBar(NamedTuple):
    """A bar and its horizontal coordinates: its label is to the left, its value to the right."""

    bar: Bar
    label: str
    begin: float
    width: float
    whisker: Sequence[float]
    """Both ends; empty without a whisker."""
    end: float
    """Right end of the bar or its whisker."""
    parts: Sequence[PlacedPart]
    """Its coloured parts; empty for a bar of one colour."""


class Drawing(NamedTuple):
    """What the template needs besides the picture itself."""

    description: str
    """What a screen reader reads."""
    width: int = _WIDTH
    height: float = 200
    x_ticks: Mapping[float, str] = MappingProxyType({})
    """Coordinate -> number beside the axis."""
    y_ticks: Mapping[float, str] = MappingProxyType({})
    series: Sequence[PlacedSeries] = ()
    bars: Sequence[PlacedBar] = ()


def place(picture: Picture) -> Drawing:
    """Return the picture with coordinates on the page."""
    if isinstance(picture, Cloud):
        return _place_cloud(picture)
    if isinstance(picture, Bars):
        return _place_bars(picture)
    return _place_chart(picture)


def _place_chart(chart: Chart) -> Drawing:
    axes = chart.axes()
    ends = "; ".join(_describe_ends(series, chart) for series in chart.series)
    return Drawing(
        description=f"{chart.title}: {ends}",
        x_ticks={_x(at, axes): text for at, text in axes.x_ticks.items()},
        y_ticks={_y(at, axes): text for at, text in axes.y_ticks.items()},
        series=[_place_series(series, chart, axes) for series in chart.series],
    )


def _place_bars(chart: Bars) -> Drawing:
    """Leave as much room for labels and for values as the longest of them needs."""
    labels = [_shorten(row.label) for row in chart.rows]
    label_letters = max(map(len, labels), default=0)
    value_letters = max((len(row.text) for row in chart.rows), default=0)
    begin = 8 + _LETTER_WIDTH * label_letters
    room = _WIDTH - begin - 6 - _LETTER_WIDTH * value_letters
    unit = room / chart.longest
    bars = []
    for label, row in zip(labels, chart.rows, strict=True):
        bars.append(
            PlacedBar(
                bar=row,
                label=label,
                begin=begin,
                width=round(unit * row.value, 1),
                whisker=[round(begin + unit * end, 1) for end in row.interval or ()],
                end=round(begin + unit * row.end, 1),
                parts=_place_parts(chart, row, begin, unit),
            )
        )
    values = "; ".join(_describe_bar(chart, row) for row in chart.rows)
    return Drawing(
        description=f"{chart.title}: {values}",
        height=_BAR_HEIGHT * len(bars) + 4,
        bars=bars,
    )


def _place_parts(chart: Bars, row: Bar, begin: float, unit: float) -> list[PlacedPart]:
    """Return the parts of a bar, side by side from `begin` on."""
    parts = []
    for name, length in zip(chart.parts, row.parts, strict=True):
        text = f"{row.label}, {name}: {number(length)}"
        parts.append(PlacedPart(round(begin, 1), round(unit * length, 1), text))
        begin += unit * length
    return parts


def _describe_bar(chart: Bars, row: Bar) -> str:
    """Return the label, and the value or the values of the parts."""
    if not row.parts:
        return f"{row.label} {row.text}"
    parts = [
        f"{name} {number(length)}"
        for name, length in zip(chart.parts, row.parts, strict=True)
    ]
    return f"{row.label}: {', '.join(parts)}"


def _shorten(label: str) -> str:
    return label if len(label) <= _MAX_LABEL else f"{label[: _MAX_LABEL - 1]}…"


def _place_cloud(cloud: Cloud) -> Drawing:
    return Drawing(
        description=f"Largest first: {', '.join(word.text for word in cloud.words)}",
        width=CLOUD_WIDTH,
        height=cloud.height,
    )


def _x(along: float, axes: Axes) -> float:
    left, right = axes.x
    return round(_LEFT + (along - left) / (right - left) * (_RIGHT - _LEFT), 1)


def _y(value: float, axes: Axes) -> float:
    low, high = axes.y
    return round(_BOTTOM - (value - low) / (high - low) * (_BOTTOM - _TOP), 1)


def _place_series(series: Series, chart: Chart, axes: Axes) -> PlacedSeries:
    dots = []
    for x, y in series.thinned():
        text = f"{chart.x} {number(x)}: {chart.show(y)}"
        if series.label:
            text = f"{series.label}, {text}"
        dots.append(Dot(_x(chart.along(x), axes), _y(y, axes), text))
    path = ""
    if series.kind != "points":
        path = "M" + "L".join(f"{dot.x} {dot.y}" for dot in dots)
    if series.kind == "curve" and len(dots) > 2:
        dots = []  # the curve shows where they are
    whiskers = []
    for whisker in series.whiskers:
        left, right = (_x(chart.along(x), axes) for x in whisker.x)
        low, high = (_y(y, axes) for y in whisker.y)
        whiskers.append(Whisker((left, right), (low, high)))
    return PlacedSeries(series, path, whiskers, dots)


def _describe_ends(series: Series, chart: Chart) -> str:
    """Return the label, and the value at the first and at the last point."""
    first, last = (
        f"{chart.show(y)} at {chart.x} {number(x)}"
        for x, y in (series.points[0], series.points[-1])
    )
    ends = first if first == last else f"{first} to {last}"
    return f"{series.label} {ends}".strip()
