"""Pictures of a page as inline SVG: a run or model a colour, which the page's style gives.

Numbers are drawn in a box of 400 x 200 units; legends are HTML. A screen reader hears the title
and where each series begins and ends.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

Point = tuple[float, float]
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 390, 12, 168
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
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def percent(value: float) -> str:
    """Of a share."""
    return f"{100 * value:.1f} %"


def tokens(value: float) -> str:
    """A number of tokens: a digit behind the point where it may be a difference."""
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def plot(
    title: str,
    series: Sequence[Series],
    *,
    x: str = "step",
    show: Callable[[float], str] = number,
    from_zero: bool = False,
    log_x: bool = False,
) -> Markup:
    """A figure. x: what the horizontal axis counts; show: of vertical values; `percent` does not
    leave 0 to 100 %.
    """
    series = [one for one in series if one.points]
    axes = _Axes(series, from_zero=from_zero, is_share=show is percent, log_x=log_x)
    drawn = [*axes.grid(show), *(_drawn(one, axes, x, show) for one in series)]
    drawn.append(Markup('<text x="390" y="197" text-anchor="end">{}</text>').format(x))
    legend = Markup("").join(
        Markup('<span class="c{} {}">{}</span>').format(one.place % 7, one.kind, one.label)
        for one in series
        if one.label
    )
    said = "; ".join(_said(one, x, show) for one in series)
    return _figure(title, said, drawn, 200, Markup('<div class="legend">{}</div>').format(legend))


def bars(title: str, rows: Sequence[tuple[str, float, str]]) -> Markup:
    """A horizontal bar a row of (label, value, text)."""
    unit = 190 / (max((value for _, value, _ in rows), default=0) or 1)
    drawn = [
        Markup(
            '<text x="0" y="{y}">{}</text><rect class="bar good" x="150" y="{top}" '
            'width="{width:.1f}" height="12"/><text x="{end:.1f}" y="{y}">{}</text>'
        ).format(
            label if len(label) < 26 else f"{label[:24]}…",
            text,
            y=20 * n + 14,
            top=20 * n + 4,
            width=unit * value,
            end=156 + unit * value,
        )
        for n, (label, value, text) in enumerate(rows)
    ]
    said = "; ".join(f"{label} {text}" for label, _, text in rows)
    return _figure(title, said, drawn, 20 * len(rows) + 4)


def _figure(
    title: str, said: str, drawn: Sequence[Markup], height: int, legend: str = ""
) -> Markup:
    return Markup(
        '<figure><figcaption>{0}</figcaption><svg viewBox="0 0 400 {1}" role="img" '
        'aria-label="{0}: {2}">{3}</svg>{4}</figure>'
    ).format(title, height, said, Markup("").join(drawn), legend)


class _Axes:
    """Where values are drawn."""

    def __init__(
        self, series: Sequence[Series], *, from_zero: bool, is_share: bool, log_x: bool
    ) -> None:
        self._log = log_x
        xs = sorted({x for one in series for x, _ in one.points})
        ys = [y for one in series for _, y in one.points]
        ys += [y for one in series for _, *both in one.intervals for y in both]
        self.xs = xs if log_x else []
        self.x = _padded([self._of_x(x) for x in xs], 0.03)
        low, high = _padded([0.0, *ys] if from_zero else ys, 0.08)
        if from_zero or is_share:
            low = max(low, 0.0)
        self.y = (low, min(high, 1.0) if is_share else high)

    def _of_x(self, x: float) -> float:
        return math.log2(x) if self._log else x

    def at(self, x: float, y: float) -> Point:
        """Across and down, in units of the drawing."""
        (left, right), (low, high) = self.x, self.y
        return (
            _LEFT + (self._of_x(x) - left) / (right - left) * (_RIGHT - _LEFT),
            _BOTTOM - (y - low) / (high - low or 1) * (_BOTTOM - _TOP),
        )

    def grid(self, show: Callable[[float], str]) -> Iterator[Markup]:
        """Lines and numbers of both axes."""
        ticks = self.xs or _ticks(*self.x, 6)
        for y in _ticks(*self.y, 4):
            _, at = self.at(ticks[0], y)
            yield Markup(
                '<line class="grid" x1="{}" x2="{}" y1="{at:.1f}" y2="{at:.1f}"/>'
                '<text x="{}" y="{below:.1f}" text-anchor="end">{}</text>'
            ).format(
                *(_LEFT, _RIGHT, _LEFT - 5, show(y).replace(".0 %", " %")), at=at, below=at + 4
            )
        free = -math.inf
        for x in ticks:
            across, _ = self.at(x, 0)
            if across > free:
                free = across + 7 * len(number(x)) + 8
                yield Markup('<text x="{:.1f}" y="183" text-anchor="middle">{}</text>').format(
                    across, number(x)
                )


def _drawn(one: Series, axes: _Axes, x: str, show: Callable[[float], str]) -> Markup:
    every = max(1, math.ceil(len(one.points) / _MOST_POINTS))
    points = [*one.points[:-1:every], one.points[-1]]
    parts = []
    if one.kind != "points":
        places = "L".join("{:.1f} {:.1f}".format(*axes.at(*point)) for point in points)
        parts.append(Markup('<path class="curve {}" d="M{}"/>').format(one.kind, places))
    for across, *ends in one.intervals:
        (px, low), (_, high) = (axes.at(across, end) for end in ends)
        parts.append(
            Markup(
                '<line class="whisker" x1="{px:.1f}" x2="{px:.1f}" y1="{:.1f}" y2="{:.1f}"/>'
            ).format(low, high, px=px)
        )
    if one.kind in ("held", "points") or (one.kind == "curve" and len(points) < 3):
        radius = 5 if one.kind == "points" else 3.5
        for point in points:
            said = f"{one.label}, " * bool(one.label) + f"{x} {number(point[0])}: {show(point[1])}"
            parts.append(
                Markup(
                    '<circle class="dot" cx="{:.1f}" cy="{:.1f}" r="{}"><title>{}</title></circle>'
                ).format(*axes.at(*point), radius, said)
            )
    return Markup('<g class="c{}">{}</g>').format(one.place % 7, Markup("").join(parts))


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
