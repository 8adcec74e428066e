"""Where the charts of a page have their lines, dots and numbers; its template draws them as SVG.

They stand in a box of 400 x 200 units, and a run or model has a colour, which the page's style
gives. A screen reader hears the title and where each series begins and ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_opsft.commands.report.chart import (
    CLOUD_WIDTH,
    Axes,
    Bars,
    Chart,
    Cloud,
    Picture,
    Series,
)
from megatron_opsft.runtime.formatting import number

_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 390, 12, 168
_LETTER = 7.2  # how wide one is at most, on average
_FONT = 12  # of a chart's texts, in page.css


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A picture in units of the page, all coordinates from the upper left corner."""

    title: str
    said: str
    """What a screen reader says."""
    note: str = ""
    """What stands below it."""
    width: int = 400
    height: float = 200
    x: str = ""
    """What the horizontal axis counts."""
    rows: Sequence[tuple[float, str]] = ()
    """(down, number) of the vertical axis."""
    columns: Sequence[tuple[float, str]] = ()
    """(across, number) of the horizontal axis."""
    lines: Sequence[dict[str, Any]] = ()
    """Series, as `_line` places them."""
    bars: Sequence[dict[str, Any]] = ()
    """Bars, as `_place_bars` places them."""
    words: Sequence[dict[str, Any]] = ()
    """Words of a cloud, as `_place_words` places them."""


def place(picture: Picture) -> Drawing:
    """The picture as the page draws it."""
    if isinstance(picture, Cloud):
        return _place_words(picture)
    return _place_bars(picture) if isinstance(picture, Bars) else _place_chart(picture)


def _place_chart(chart: Chart) -> Drawing:
    axes = chart.axes()
    return Drawing(
        title=chart.title,
        said=f"{chart.title}: {'; '.join(_said(one, chart) for one in chart.series)}",
        note=chart.note,
        x=chart.x,
        rows=[(_down(y, axes), text) for y, text in axes.y_ticks],
        columns=[(_across(x, axes), text) for x, text in axes.x_ticks],
        lines=[_line(one, chart, axes) for one in chart.series],
    )


def _place_bars(chart: Bars) -> Drawing:
    """A row is 20 units high; label and text have as much room as the longest of them needs."""
    labels = [
        row.label if len(row.label) < 26 else f"{row.label[:24]}…" for row in chart.rows
    ]
    begin = 8 + _LETTER * max(map(len, labels), default=0)
    room = (
        400
        - begin
        - 6
        - _LETTER * max((len(row.text) for row in chart.rows), default=0)
    )
    unit = room / (max((row.end for row in chart.rows), default=0) or 1)
    bars = []
    for n, (label, row) in enumerate(zip(labels, chart.rows, strict=True)):
        ends = [end for end in (row.low, row.high) if end is not None]
        bars.append(
            {
                "down": 20 * n,
                "begin": begin,
                "width": round(unit * row.value, 1),
                "whisker": [round(begin + unit * end, 1) for end in ends],
                "end": round(begin + unit * row.end, 1),
                "label": label,
                "text": row.text,
            }
        )
    return Drawing(
        title=chart.title,
        said=f"{chart.title}: {'; '.join(f'{row.label} {row.text}' for row in chart.rows)}",
        note=chart.note,
        height=20 * len(bars) + 4,
        bars=bars,
    )


def _place_words(cloud: Cloud) -> Drawing:
    """transform: moves and enlarges a word of the page's font."""
    return Drawing(
        title=cloud.title,
        said=f"Largest first: {', '.join(word.text for word in cloud.words)}",
        note=cloud.note,
        width=CLOUD_WIDTH,
        height=cloud.height,
        words=[
            {
                "place": n % 7,
                "transform": f"translate({word.x} {word.y}) scale({word.size / _FONT:.3f})",
                "said": word.said,
                "text": word.text,
            }
            for n, word in enumerate(cloud.words)
        ],
    )


def _across(along: float, axes: Axes) -> float:
    left, right = axes.x
    return round(_LEFT + (along - left) / (right - left) * (_RIGHT - _LEFT), 1)


def _down(y: float, axes: Axes) -> float:
    low, high = axes.y
    return round(_BOTTOM - (y - low) / (high - low or 1) * (_BOTTOM - _TOP), 1)


def _line(one: Series, chart: Chart, axes: Axes) -> dict[str, Any]:
    """place, kind and label of a series; path: of its curve; whiskers: (across, across, down,
    down); dots: (across, down, what is said when it is pointed at).
    """
    points = one.thinned()
    at = [(_across(chart.along(x), axes), _down(y, axes)) for x, y in points]
    label = f"{one.label}, " * bool(one.label)
    has_dots = one.kind != "curve" or len(points) < 3
    upright = [
        (
            _across(chart.along(x), axes),
            _across(chart.along(x), axes),
            *_downs(ends, axes),
        )
        for x, *ends in one.intervals
    ]
    flat = [
        (
            *(_across(chart.along(end), axes) for end in ends),
            _down(y, axes),
            _down(y, axes),
        )
        for y, *ends in one.across
    ]
    return {
        "place": one.place % 7,
        "kind": one.kind,
        "label": one.label,
        "path": "M" + "L".join(f"{x} {y}" for x, y in at)
        if one.kind != "points"
        else "",
        "whiskers": [*upright, *flat],
        "dots": [
            (*where, f"{label}{chart.x} {number(x)}: {chart.show(y)}")
            for where, (x, y) in zip(at, points, strict=True)
            if has_dots
        ],
    }


def _downs(ends: Sequence[float], axes: Axes) -> tuple[float, ...]:
    return tuple(_down(end, axes) for end in ends)


def _said(one: Series, chart: Chart) -> str:
    first_and_last = (one.points[0], one.points[-1])
    ends = [f"{chart.show(y)} at {chart.x} {number(at)}" for at, y in first_and_last]
    return f"{one.label} {' to '.join(dict.fromkeys(ends))}".strip()
