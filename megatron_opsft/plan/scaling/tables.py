"""Strong- and weak-scaling tables in Markdown, and simulated points beside measured ones; pure."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import groupby
from typing import Any

from megatron_opsft.plan.scaling.points import ScalingPoint

Series = tuple[str, list[ScalingPoint]]
"""A name and at least two points of it, by ranks, measured ones first."""


def strong_series(points: Sequence[ScalingPoint]) -> list[Series]:
    """The same work on more ranks: equal layout and equal prompts in a step."""
    return _series(
        points,
        lambda p: (p.layout, p.prompts_per_step),
        lambda p: f"{p.layout_name}, B {p.prompts_per_step}",
    )


def weak_series(points: Sequence[ScalingPoint]) -> list[Series]:
    """Work that grows with the ranks: equal layout and equal prompts for each rank."""
    return _series(
        points,
        lambda p: (p.layout, p.prompts_per_step / p.ranks),
        lambda p: f"{p.layout_name}, B {p.prompts_per_step / p.ranks:g} a rank",
    )


def _series(
    points: Sequence[ScalingPoint],
    key: Callable[[ScalingPoint], Hashable],
    name: Callable[[ScalingPoint], str],
) -> list[Series]:
    found: dict[Hashable, list[ScalingPoint]] = {}
    for point in points:
        found.setdefault(key(point), []).append(point)
    return [
        (name(group[0]), sorted(group, key=lambda p: (p.ranks, p.simulated)))
        for group in found.values()
        if len({point.ranks for point in group}) > 1
    ]


def scaling_page(points: Sequence[ScalingPoint]) -> str:
    """All tables there are points for, as one Markdown page."""
    parts = ["# Scaling"]
    for title, all_series, efficiency in (
        ("Strong scaling: the same work on more ranks", strong_series(points), strong_efficiency),
        ("Weak scaling: work that grows with the ranks", weak_series(points), weak_efficiency),
    ):
        if all_series:
            parts.append(f"## {title}")
        for name, series in all_series:
            parts += [f"### {name}", _scaling_table(series, efficiency)]
    if pairs := compared(points):
        parts += ["## Simulated and measured", _comparison_table(pairs)]
    if len(parts) == 1:
        parts += ["## Points", _scaling_table(points, None)]
    return "\n\n".join(parts) + "\n"


def strong_efficiency(point: ScalingPoint, first: ScalingPoint) -> float:
    """Share of the speed-up that so many more ranks could bring."""
    return first.step_seconds * first.ranks / (point.step_seconds * point.ranks)


def weak_efficiency(point: ScalingPoint, first: ScalingPoint) -> float:
    """A step takes as long as the first one's where it is 1."""
    return first.step_seconds / point.step_seconds


def first_of_kind(point: ScalingPoint, series: Sequence[ScalingPoint]) -> ScalingPoint:
    """What a point's efficiency is relative to: simulated points to simulated ones."""
    return next(p for p in series if p.simulated == point.simulated)


def _scaling_table(
    series: Sequence[ScalingPoint], efficiency: Callable[[ScalingPoint, ScalingPoint], float] | None
) -> str:
    heads = ["ranks", "", "step s", "rollout", "verify", "train", "push", "tokens/s", "efficiency"]
    heads += ["idle: rollout tail", "bubble", "slowest rank", "fits"]
    rows = []
    for point in series:
        seconds = (
            point.step_seconds,
            point.rollout_seconds,
            point.verify_seconds,
            point.train_seconds,
            point.push_seconds,
        )
        relative = efficiency(point, first_of_kind(point, series)) if efficiency else None
        rows.append(
            [
                f"{point.ranks:,}",
                "simulated" if point.simulated else "measured",
                *(_seconds(value) for value in seconds),
                f"{point.tokens_per_second:,.0f}",
                _share(relative),
                _share(point.rollout_tail),
                _share(point.pipeline_bubble),
                _share(point.slowest_rank),
                {None: "", True: "yes", False: "NO"}[point.fits],
            ]
        )
    return _markdown(heads, rows)


def compared(points: Sequence[ScalingPoint]) -> list[tuple[ScalingPoint, ScalingPoint]]:
    """(measured, simulated) of the same case."""

    def case(point: ScalingPoint) -> tuple[Any, ...]:
        return point.layout, point.prompts_per_step, point.ranks

    pairs = []
    for _, group in groupby(sorted(points, key=case), key=case):
        both = list(group)
        simulated = [point for point in both if point.simulated]
        pairs += [(m, s) for m in both if not m.simulated for s in simulated]
    return pairs


def _comparison_table(pairs: Iterable[tuple[ScalingPoint, ScalingPoint]]) -> str:
    heads = ["case", "ranks", "measured s", "simulated s", "simulated / measured"]
    rows = [
        [
            f"{measured.layout_name}, B {measured.prompts_per_step}",
            f"{measured.ranks:,}",
            _seconds(measured.step_seconds),
            _seconds(simulated.step_seconds),
            f"{simulated.step_seconds / measured.step_seconds:.2f}",
        ]
        for measured, simulated in pairs
    ]
    return _markdown(heads, rows)


def _markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---:" if n else "---" for n in range(len(heads))], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value >= 100 else f"{value:.3g}"


def _share(value: float | None) -> str:
    if value is None:
        return ""
    percent = abs(100 * value)
    return f"{percent:.1f} %" if 0.05 <= percent < 1 else f"{percent:.0f} %"
