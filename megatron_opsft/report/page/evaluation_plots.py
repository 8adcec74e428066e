"""Pictures of a block of a table: lengths, accuracy against length, budget curves."""

from collections.abc import Sequence

from markupsafe import Markup

from megatron_opsft.report.estimate import Estimate
from megatron_opsft.report.page.plot import Series, bars, number, percent, plot
from megatron_opsft.report.table import TableRow

_SCATTER = 7  # rows that colours tell apart
_AT_BUDGETS = {"accuracy": "Accuracy", "mean_tokens": "Mean tokens", "norm_std": "NormStd"}


def plots_of_block(rows: Sequence[TableRow], block: str) -> list[Markup]:
    """Of the rows that have the block. Budget curves of those that have budgets."""
    rows = [row for row in rows if row.blocks.get(block)]
    lengths = [
        (row.label, metrics["mean_tokens"].value, f"{metrics['mean_tokens'].value:,.1f}")
        for row in rows
        if (metrics := row.blocks[block])
    ]
    found = [bars("Mean response tokens", lengths)] if len(rows) > 1 else []
    if len(rows) <= _SCATTER:
        found.append(_scatter(rows, block))
        found += [
            plot(
                f"{title} at a token budget",
                series,
                x="budget",
                show=percent if metric == "accuracy" else number,
                from_zero=True,
                log_x=True,
            )
            for metric, title in _AT_BUDGETS.items()
            if (series := _at_budgets(rows, block, metric))
        ]
    return found


def _scatter(rows: Sequence[TableRow], block: str) -> Markup:
    points = [
        (row.blocks[block]["mean_tokens"].value, row.blocks[block]["accuracy"].value)
        for row in rows
    ]
    series = [
        Series(
            label=row.label,
            place=place,
            points=[points[place]],
            kind="points",
            intervals=_whiskers([(points[place][0], row.blocks[block]["accuracy"])]),
        )
        for place, row in enumerate(rows)
    ]
    title = "Accuracy against mean response tokens"
    if len(points) > 1:
        title += ", with the Pareto front"
        front = sorted(points[place] for place in pareto_front(points))
        front.append((max(tokens for tokens, _ in points), front[-1][1]))
        series.append(Series(label="", place=6, points=front, kind="front"))
    return plot(title, series, x="tokens", show=percent, ends=(0.0, 1.0))


def _at_budgets(rows: Sequence[TableRow], block: str, metric: str) -> list[Series]:
    found = []
    for place, row in enumerate(rows):
        at = [(b, m[metric]) for b, m in row.budgets.get(block, ()) if metric in m]
        points = [(float(budget), estimate.value) for budget, estimate in at]
        if points:
            found.append(
                Series(label=row.label, place=place, points=points, intervals=_whiskers(at))
            )
    return found


def _whiskers(at: Sequence[tuple[float, Estimate]]) -> list[tuple[float, float, float]]:
    return [(x, e.low, e.high) for x, e in at if e.low is not None and e.high is not None]


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
