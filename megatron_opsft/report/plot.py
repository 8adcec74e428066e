"""Where the pictures of a page have their lines, dots and numbers; its template draws them as SVG.

They stand in a box of 400 x 200 units, and a run or model has a colour, which the page's style
gives. A screen reader hears the title and where each series begins and ends.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Point = tuple[float, float]
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 390, 12, 168
_LETTER = 7.2  # how wide one is at most, on average
_MOST_POINTS = 400  # of a series: more than there are pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """place: of its colour. kind: "curve", "held" (dots joined by dots) or "points".
    intervals: (x, low, high) of whiskers.
    """

    label: str
    place: int
    points: Sequence[Point]
    kind: str = "curve"
    intervals: Sequence[tuple[float, float, float]] = ()


def number(value: float | None) -> str:
    """For people: three digits, thousands apart; a dash for none."""
    if value is None or not math.isfinite(value):
        return "–"
    if value and abs(value) < 1e-3:
        return f"{value:.2g}"
    is_whole = abs(value) >= 999.5 or value == int(value)  # of which three digits would be 1e+03
    return f"{value:,.0f}" if is_whole else f"{value:.3g}"


def percent(value: float) -> str:
    """Of a share."""
    return f"{100 * value:.1f} %"


def tokens(value: float) -> str:
    """A number of tokens: a digit behind the point where it may be a difference."""
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """said: to a screen reader. rows: (down, number) of the vertical axis; columns: (across,
    number) of the horizontal one, which counts `x`. lines: as of `_line`; bars: (down, where
    it begins, width, label, text).
    """

    title: str
    said: str
    height: int = 200
    x: str = ""
    rows: Sequence[tuple[float, str]] = ()
    columns: Sequence[tuple[float, str]] = ()
    lines: Sequence[dict[str, Any]] = ()
    bars: Sequence[tuple[int, float, float, str, str]] = ()


def plot(
    title: str,
    series: Sequence[Series],
    *,
    x: str = "step",
    show: Callable[[float], str] = number,
    from_zero: bool = False,
    log_x: bool = False,
) -> Figure:
    """x: what the horizontal axis counts; show: of vertical values; `percent` does not leave 0 to
    100 %.
    """
    series = [one for one in series if one.points]
    axes = _Axes(series, from_zero=from_zero, is_share=show is percent, log_x=log_x)
    columns: list[tuple[float, str]] = []
    free = -math.inf
    for tick in axes.xs if log_x else _ticks(*axes.x, 6):
        if (across := axes.across(tick)) > free:
            free = across + 7 * len(number(tick)) + 8
            columns.append((across, number(tick)))
    return Figure(
        title=title,
        said="; ".join(_said(one, x, show) for one in series),
        x=x,
        rows=[(axes.down(y), show(y).replace(".0 %", " %")) for y in _ticks(*axes.y, 4)],
        columns=columns,
        lines=[_line(one, axes, x, show) for one in series],
    )


def bars(title: str, rows: Sequence[tuple[str, float, str]]) -> Figure:
    """A horizontal bar a row of (label, value, text); label and text have as much room as the
    longest of them needs.
    """
    labels = [label if len(label) < 26 else f"{label[:24]}…" for label, _, _ in rows]
    begin = 8 + _LETTER * max(map(len, labels), default=0)
    room = 400 - begin - 6 - _LETTER * max((len(text) for _, _, text in rows), default=0)
    unit = room / (max((value for _, value, _ in rows), default=0) or 1)
    return Figure(
        title=title,
        said="; ".join(f"{label} {text}" for label, _, text in rows),
        height=20 * len(rows) + 4,
        bars=[
            (20 * n, begin, round(unit * value, 1), label, text)
            for n, (label, (_, value, text)) in enumerate(zip(labels, rows, strict=True))
        ],
    )


class _Axes:
    """Where values are drawn."""

    def __init__(
        self, series: Sequence[Series], *, from_zero: bool, is_share: bool, log_x: bool
    ) -> None:
        self._of_x = math.log2 if log_x else float
        self.xs = sorted({x for one in series for x, _ in one.points})
        ys = [y for one in series for _, y in one.points]
        ys += [y for one in series for _, *both in one.intervals for y in both]
        self.x = _padded([self._of_x(x) for x in self.xs], 0.03)
        low, high = _padded([0.0, *ys] if from_zero else ys, 0.08)
        if from_zero or is_share:
            low = max(low, 0.0)
        self.y = (low, min(high, 1.0) if is_share else high)

    def across(self, x: float) -> float:
        """In units of the drawing."""
        left, right = self.x
        return round(_LEFT + (self._of_x(x) - left) / (right - left) * (_RIGHT - _LEFT), 1)

    def down(self, y: float) -> float:
        """In units of the drawing."""
        low, high = self.y
        return round(_BOTTOM - (y - low) / (high - low or 1) * (_BOTTOM - _TOP), 1)


def _line(one: Series, axes: _Axes, x: str, show: Callable[[float], str]) -> dict[str, Any]:
    """place, kind and label of a series; path: of its curve; whiskers: (across, down, down); dots:
    (across, down, what is said when it is pointed at).
    """
    every = max(1, math.ceil(len(one.points) / _MOST_POINTS))
    points = [*one.points[:-1:every], one.points[-1]]
    path = "L".join(f"{axes.across(px)} {axes.down(py)}" for px, py in points)
    label = f"{one.label}, " * bool(one.label)
    has_dots = one.kind != "curve" or len(points) < 3
    return {
        "place": one.place % 7,
        "kind": one.kind,
        "label": one.label,
        "path": f"M{path}" if one.kind != "points" else "",
        "whiskers": [(axes.across(w), axes.down(lo), axes.down(hi)) for w, lo, hi in one.intervals],
        "dots": [
            (axes.across(px), axes.down(py), f"{label}{x} {number(px)}: {show(py)}")
            for px, py in (points if has_dots else ())
        ],
    }


def _said(one: Series, x: str, show: Callable[[float], str]) -> str:
    ends = [f"{show(y)} at {x} {number(at)}" for at, y in (one.points[0], one.points[-1])]
    return f"{one.label} {' to '.join(dict.fromkeys(ends))}".strip()


def _padded(values: Sequence[float], share: float) -> Point:
    """Lowest and highest with a share of room on both sides; never the same."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = share * (high - low) or abs(low) * 0.1 or 0.5
    return low - room, high + room


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Round values inside, about `count` of them."""
    raw = (high - low) / count or 1.0
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]
