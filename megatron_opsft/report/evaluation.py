"""Figures of an evaluation: accuracy against length with its Pareto front, and budget curves.

Shares are in [0, 1]. Colours are Okabe and Ito's, which colour-blind readers distinguish; every
model has a marker of its own too. The same input gives the same bytes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError
from megatron_opsft.report.canvas import check_suffixes, figure_saved_as
from megatron_opsft.report.estimate import Estimate
from megatron_opsft.report.labels import shown

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_MARKERS = ("o", "s", "D", "^", "v", "P", "X", "<", ">")
_FRONT_COLOR = "#888888"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterPoint:
    """One model: a share of correct samples against mean tokens."""

    label: str
    tokens: Estimate
    accuracy: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetCurve:
    """One model: estimates at each of its budgets, ascending; no NormStd of a single sample."""

    label: str
    budgets: Sequence[int]
    accuracy: Sequence[Estimate]
    tokens: Sequence[Estimate]
    norm_std: Sequence[Estimate | None]


def pareto_front(points: Sequence[tuple[float, float]]) -> set[int]:
    """Places of the (tokens, accuracy) points that none beats: fewer tokens, higher accuracy."""
    return {
        place
        for place, (tokens, accuracy) in enumerate(points)
        if not any(
            other[0] <= tokens and other[1] >= accuracy and other != (tokens, accuracy)
            for other in points
        )
    }


def plot_accuracy_length(
    points: Sequence[ScatterPoint], out_paths: Sequence[Path], *, title: str = ""
) -> None:
    """Draw accuracy (%) against mean tokens with intervals and Pareto front into each file.

    `UserError` for no point or a suffix other than .png, .svg and .pdf.
    """
    _check(points, out_paths)
    crowd = _crowd(points)
    with figure_saved_as(out_paths, (9.6 if crowd else 6.6, 4.6)) as figure:
        panels = figure.subplots(1, 2 if crowd else 1, squeeze=False)[0]
        for axes in panels:
            _draw_points(axes, points)
        panels[0].set_xlim(left=0)
        low, high = panels[0].get_ylim()
        high = max(high, low + 10)  # so that noise of a point looks like noise
        panels[0].set_ylim(low - max(0.0, high - 101), min(high, 101))
        panels[0].set_title(shown(title))
        if crowd:
            _zoom(panels[1], crowd)
        handles, labels = panels[0].get_legend_handles_labels()
        columns = min(6 if crowd else 3, len(points) + 1)
        figure.legend(
            handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9
        )


def plot_budgets(
    curves: Sequence[BudgetCurve], out_paths: Sequence[Path], *, title: str = ""
) -> None:
    """Draw accuracy, mean tokens and NormStd against the token budget, one line per model.

    Shaded: intervals. `UserError` as in `plot_accuracy_length`.
    """
    _check(curves, out_paths)
    headings = ["accuracy (%)", "mean response tokens"]
    if any(estimate is not None for curve in curves for estimate in curve.norm_std):
        headings.append("NormStd of lengths")
    with figure_saved_as(out_paths, (3.2 * len(headings), 3.6)) as figure:
        panels = figure.subplots(1, len(headings))
        for place, curve in enumerate(curves):
            drawn = (curve.accuracy, curve.tokens, curve.norm_std)
            for axes, estimates, scale in zip(panels, drawn, (100, 1, 1), strict=False):
                _draw_curve(axes, curve, estimates, scale, place)
        budgets = _ticks({budget for curve in curves for budget in curve.budgets})
        for axes, heading in zip(panels, headings, strict=True):
            axes.set_title(heading, fontsize=10)
            axes.set_xlabel("token budget")
            axes.set_xscale("log", base=2)
            axes.set_xticks(budgets, [_short(budget) for budget in budgets], minor=False)
            axes.set_xticks([], minor=True)
            axes.set_ylim(bottom=0)
            _finish(axes)
        panels[1].yaxis.set_major_formatter(_thousands)
        handles, labels = panels[0].get_legend_handles_labels()
        if title:
            figure.suptitle(shown(title), fontsize=11)
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(4, len(curves)), frameon=False
        )


def _draw_curve(
    axes: Any, curve: BudgetCurve, estimates: Sequence[Estimate | None], scale: float, place: int
) -> None:
    axes.plot(
        curve.budgets,
        [nan if estimate is None else scale * estimate.value for estimate in estimates],
        linewidth=1.5,
        markersize=6,
        markeredgecolor="white",
        clip_on=False,
        zorder=3,
        label=shown(curve.label),
        **_look(place),
    )
    known = [
        (budget, scale * estimate.low, scale * estimate.high)
        for budget, estimate in zip(curve.budgets, estimates, strict=True)
        if estimate is not None and estimate.low is not None and estimate.high is not None
    ]
    if known:
        budgets, low, high = zip(*known, strict=True)
        axes.fill_between(budgets, low, high, color=_look(place)["color"], alpha=0.15, linewidth=0)


def _crowd(points: Sequence[ScatterPoint]) -> list[ScatterPoint]:
    """The points that would hide each other beside the longest one; empty where all can be told."""
    shortest = min(point.tokens.value for point in points)
    best = max(point.accuracy.value for point in points)
    near = [
        point
        for point in points
        if point.tokens.value <= 2 * shortest and point.accuracy.value >= best - 0.1
    ]
    spread = max(point.tokens.value for point in points) / max(shortest, 1e-9)
    return near if len(near) >= 6 and spread > 4 else []


def _zoom(axes: Any, crowd: Sequence[ScatterPoint]) -> None:
    """Limits of a panel that shows the crowd alone."""
    for direction, key, scale in (("x", "tokens", 1), ("y", "accuracy", 100)):
        values = [scale * getattr(point, key).value for point in crowd]
        room = 0.08 * (max(values) - min(values)) or 1.0
        getattr(axes, f"set_{direction}lim")(min(values) - room, max(values) + room)
    axes.locator_params(axis="x", integer=True)
    axes.set_title("the same, where most of them are", fontsize=10)


def _draw_points(axes: Any, points: Sequence[ScatterPoint]) -> None:
    front = pareto_front([(point.tokens.value, point.accuracy.value) for point in points])
    for place, point in enumerate(points):
        look = _look(place)
        axes.errorbar(
            [point.tokens.value],
            [100 * point.accuracy.value],
            xerr=_whiskers(point.tokens),
            yerr=_whiskers(point.accuracy, scale=100),
            color=look["color"],
            linestyle="none",
            elinewidth=1.1,
        )
        axes.plot(
            [point.tokens.value],
            [100 * point.accuracy.value],
            markersize=9 if place in front else 7,
            markeredgecolor="white",
            linestyle="none",
            zorder=3,
            label=shown(point.label),
            **look,
        )
    _draw_front(axes, points, front)
    axes.set_xlabel("mean response tokens")
    axes.set_ylabel("accuracy (%)")
    axes.xaxis.set_major_formatter(_thousands)
    _finish(axes)


def _draw_front(axes: Any, points: Sequence[ScatterPoint], places: Iterable[int]) -> None:
    """A staircase: what accuracy some model reaches with at most so many tokens."""
    front = sorted((points[n].tokens.value, 100 * points[n].accuracy.value) for n in places)
    end = max(point.tokens.value for point in points)
    if len(points) > 1:
        tokens, accuracy = zip(*front, (end, front[-1][1]), strict=True)
        axes.plot(
            tokens,
            accuracy,
            drawstyle="steps-post",
            color=_FRONT_COLOR,
            linestyle="--",
            linewidth=1.1,
            zorder=2,
            label="Pareto front",
        )


def _whiskers(estimate: Estimate, scale: float = 1.0) -> list[list[float]] | None:
    """Lengths below and above the value, as matplotlib wants them; None without interval."""
    if estimate.low is None or estimate.high is None:
        return None
    below, above = estimate.value - estimate.low, estimate.high - estimate.value
    return [[scale * max(0.0, below)], [scale * max(0.0, above)]]


def _look(place: int) -> dict[str, Any]:
    return {"color": _COLORS[place % len(_COLORS)], "marker": _MARKERS[place % len(_MARKERS)]}


def _ticks(budgets: Iterable[int]) -> list[int]:
    """The budgets that have room for a label, the largest first among them."""
    shown: list[int] = []
    for budget in sorted(budgets, reverse=True):
        if not shown or budget < 0.6 * shown[-1]:
            shown.append(budget)
    return shown[::-1]


def _short(budget: int) -> str:
    return f"{budget // 1024}k" if budget % 1024 == 0 else f"{budget:,}"


def _thousands(value: float, _: int) -> str:
    return f"{value:,.0f}"


def _finish(axes: Any) -> None:
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _check(drawn: Sequence[object], out_paths: Sequence[Path]) -> None:
    check_suffixes(out_paths)
    if not drawn:
        raise UserError("figure: there is no model to draw")
