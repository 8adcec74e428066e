"""Pictures of a page as inline SVG: a run or model a colour, which the page's style gives.

Numbers are drawn in a box of 400 x 200 units; legends are HTML. A screen reader hears the title
and where each series begins and ends.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

Point = tuple[float, float]
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 400, 48, 390, 12, 168
_MOST_POINTS = 400  # of a series: more than there are pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """place: of its colour. kind: "curve", "held" (dots joined by dots), "points" or "front".
    intervals: (x, low, high) of whiskers.
    """

    label: str
    place: int
    points: Sequence[Point]
    kind: str = "curve"
    intervals: Sequence[tuple[float, float, float]] = field(default_factory=tuple)


def number(value: float | None) -> str:
    """For people: three digits, thousands apart; a dash for none."""
    if value is None or not math.isfinite(value):
        return "–"
    if value and abs(value) < 1e-3:
        return f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def percent(value: float | None) -> str:
    """Of a share; a dash for none."""
    return "–" if value is None else f"{100 * value:.1f} %"


def plot(
    title: str,
    series: Sequence[Series],
    *,
    x: str = "step",
    show: Callable[[float], str] = number,
    from_zero: bool = False,
    ends: Point = (-math.inf, math.inf),
    log_x: bool = False,
) -> Markup:
    """A figure. x: what the horizontal axis counts; show: of vertical values; ends: which they do
    not leave.
    """
    series = [one for one in series if one.points]
    axes = _Axes(series, from_zero=from_zero, ends=ends, log_x=log_x)
    said = "; ".join(filter(None, (_said(one, x, show) for one in series)))
    drawn = Markup("").join([*axes.grid(show), *(_drawn(one, axes, x, show) for one in series)])
    legend = Markup("").join(
        Markup('<span class="c{} {}">{}</span>').format(one.place % 7, one.kind, one.label)
        for one in series
        if one.label
    )
    return Markup(
        '<figure><figcaption>{}</figcaption><svg viewBox="0 0 400 200" role="img" '
        'aria-label="{}: {}">{}<text x="390" y="197" text-anchor="end">{}</text></svg>'
        '<div class="legend">{}</div></figure>'
    ).format(title, title, said, drawn, x, legend)


def bars(title: str, rows: Sequence[tuple[str, float, str]]) -> Markup:
    """A horizontal bar a row of (label, value, text)."""
    most = max((value for _, value, _ in rows), default=0) or 1
    drawn = Markup("").join(
        Markup(
            '<text x="0" y="{y:.0f}">{label}</text>'
            '<rect class="bar good" x="150" y="{top:.0f}" width="{width:.1f}" height="12"/>'
            '<text x="{end:.1f}" y="{y:.0f}">{text}</text>'
        ).format(
            label=label if len(label) < 26 else f"{label[:24]}…",
            text=text,
            y=20 * n + 14,
            top=20 * n + 4,
            width=190 * value / most,
            end=156 + 190 * value / most,
        )
        for n, (label, value, text) in enumerate(rows)
    )
    return Markup(
        '<figure><figcaption>{0}</figcaption><svg viewBox="0 0 400 {1}" role="img" '
        'aria-label="{0}: {2}">{3}</svg></figure>'
    ).format(title, 20 * len(rows) + 4, "; ".join(f"{row[0]} {row[2]}" for row in rows), drawn)


class _Axes:
    """Where values are drawn."""

    def __init__(
        self, series: Sequence[Series], *, from_zero: bool, ends: Point, log_x: bool
    ) -> None:
        self._log = log_x
        points = [point for one in series for point in one.points]
        xs = [self._of_x(x) for x, _ in points]
        reach = [(x, y) for one in series for x, *both in one.intervals for y in both]
        ys = [y for _, y in (*points, *reach)]
        self.xs = sorted({x for x, _ in points}) if log_x else []
        self.x = _padded(xs, 0.03)
        low, high = _padded([0.0, *ys] if from_zero else ys, 0.08)
        self.y = (max(low, ends[0], 0.0 if from_zero else -math.inf), min(high, ends[1]))

    def _of_x(self, x: float) -> float:
        return math.log2(x) if self._log else x

    def px(self, x: float) -> float:
        """Across, in units of the drawing."""
        low, high = self.x
        return _LEFT + (self._of_x(x) - low) / (high - low) * (_RIGHT - _LEFT)

    def py(self, y: float) -> float:
        """Down, in units of the drawing."""
        low, high = self.y
        return _BOTTOM - (y - low) / (high - low or 1) * (_BOTTOM - _TOP)

    def grid(self, show: Callable[[float], str]) -> Iterator[Markup]:
        """Lines and numbers of both axes."""
        for y in _ticks(*self.y, 4):
            yield Markup(
                '<line class="grid" x1="{}" x2="{}" y1="{at:.1f}" y2="{at:.1f}"/>'
                '<text x="{}" y="{below:.1f}" text-anchor="end">{}</text>'
            ).format(
                *(_LEFT, _RIGHT, _LEFT - 5, show(y).replace(".0 %", " %")),
                at=self.py(y),
                below=self.py(y) + 4,
            )
        free = -math.inf
        for x in self.xs or _ticks(*self.x, 6):
            if self.px(x) > free:
                free = self.px(x) + 7 * len(number(x)) + 8
                yield Markup('<text x="{:.1f}" y="183" text-anchor="middle">{}</text>').format(
                    self.px(x), number(x)
                )


def _drawn(one: Series, axes: _Axes, x: str, show: Callable[[float], str]) -> Markup:
    every = max(1, math.ceil(len(one.points) / _MOST_POINTS))
    points = [*one.points[:-1:every], one.points[-1]]
    parts = []
    if one.kind != "points":
        path = ""
        for point in points:
            px, py = axes.px(point[0]), axes.py(point[1])
            step = f"H{px:.1f}V{py:.1f}" if one.kind == "front" else f"L{px:.1f} {py:.1f}"
            path += step if path else f"M{px:.1f} {py:.1f}"
        kind = "front" if one.kind == "front" else f"curve {one.kind}"
        parts.append(Markup('<path class="{}" d="{}"/>').format(kind, path))
    for at, low, high in one.intervals:
        parts.append(
            Markup(
                '<line class="whisker" x1="{px:.1f}" x2="{px:.1f}" y1="{:.1f}" y2="{:.1f}"/>'
            ).format(axes.py(low), axes.py(high), px=axes.px(at))
        )
    if one.kind in ("held", "points") or (one.kind == "curve" and len(points) < 3):
        for point in points:
            parts.append(
                Markup(
                    '<circle class="dot" cx="{:.1f}" cy="{:.1f}" r="{}">'
                    "<title>{}{}</title></circle>"
                ).format(
                    *(axes.px(point[0]), axes.py(point[1])),
                    5 if one.kind == "points" else 3.5,
                    f"{one.label}, " if one.label else "",
                    f"{x} {number(point[0])}: {show(point[1])}",
                )
            )
    return Markup('<g class="c{}">{}</g>').format(one.place % 7, Markup("").join(parts))


def _said(one: Series, x: str, show: Callable[[float], str]) -> str:
    if one.kind == "front":
        return ""
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
