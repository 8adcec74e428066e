"""What the figures of `report.evaluation` show, from the estimates of several models."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_opsft.evaluate.bootstrap import Estimate
from megatron_opsft.evaluate.results import BudgetPoint
from megatron_opsft.evaluate.tables import TableRow


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterPoint:
    """accuracy: a share; tokens: mean; on_front: no other point is as good in both and better in
    one."""

    label: str
    tokens: Estimate
    accuracy: Estimate
    on_front: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetCurve:
    """One model: estimates at each budget, ascending."""

    label: str
    budgets: tuple[int, ...]
    accuracy: tuple[Estimate, ...]
    tokens: tuple[Estimate, ...]
    norm_std: tuple[Estimate, ...]


def scatter_points(rows: Sequence[TableRow], block: str) -> tuple[ScatterPoint, ...]:
    """One point per row, of a benchmark or OVERALL."""
    pairs = [(row.blocks[block]["mean_tokens"], row.blocks[block]["accuracy"]) for row in rows]
    front = pareto_front([(tokens.value, accuracy.value) for tokens, accuracy in pairs])
    return tuple(
        ScatterPoint(label=row.label, tokens=tokens, accuracy=accuracy, on_front=place in front)
        for place, (row, (tokens, accuracy)) in enumerate(zip(rows, pairs, strict=True))
    )


def budget_curves(
    labels: Sequence[str], points: Sequence[Sequence[BudgetPoint]]
) -> tuple[BudgetCurve, ...]:
    """One curve per model that has budgets, of a benchmark or OVERALL."""
    return tuple(
        BudgetCurve(
            label=label,
            budgets=tuple(point.budget for point in own),
            accuracy=tuple(point.metrics["accuracy"] for point in own),
            tokens=tuple(point.metrics["mean_tokens"] for point in own),
            norm_std=tuple(point.metrics["norm_std"] for point in own),
        )
        for label, own in zip(labels, points, strict=True)
        if own
    )


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
