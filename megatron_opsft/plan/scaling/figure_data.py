"""Series of points as the figure takes them; pure."""

from collections.abc import Sequence

from megatron_opsft.plan.scaling.tables import Series
from megatron_opsft.report.scaling import Idle, Line

_CAUSES = {
    "slowest rank": "slowest_rank",
    "pipeline bubble": "pipeline_bubble",
    "rollout tail": "rollout_tail",
}


def lines_of(all_series: Sequence[Series]) -> list[Line]:
    """A line for each series."""
    return [
        Line(
            name=name,
            ranks=tuple(point.ranks for point in series),
            seconds=tuple(point.step_seconds for point in series),
            hollow=tuple(point.simulated for point in series),
        )
        for name, series in all_series
    ]


def idle_of(all_series: Sequence[Series]) -> Idle | None:
    """Shares of the first series that has simulated points."""
    for name, series in all_series:
        simulated = [point for point in series if point.simulated]
        if len(simulated) > 1:
            return Idle(
                name=name,
                ranks=tuple(point.ranks for point in simulated),
                causes={
                    cause: tuple(getattr(point, key) for point in simulated)
                    for cause, key in _CAUSES.items()
                },
            )
    return None
