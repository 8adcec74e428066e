"""What a page shows of runs and evaluations: tables, charts, and a problem before and after."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from megatron_opsft.commands.report.chart import Bar, Bars, Chart, Picture, Series
from megatron_opsft.commands.report.runs import Run, changes_of
from megatron_opsft.commands.report.table import (
    COLUMNS,
    MORE_COLUMNS,
    Cell,
    Estimate,
    Table,
    TableRow,
    cells,
    used_columns,
)
from megatron_opsft.runtime.formatting import number, percent

_SCATTER = 7  # rows that colours tell apart
OVER_PROBLEMS = "95 % intervals, bootstrap over problems"
_OF_SEEDS = "standard deviation over seeds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A table with its charts: a benchmark of evaluations, a section of a study, or a part of a
    diagnosis.
    """

    title: str
    text: str
    table: Table | None = None
    plots: Sequence[Picture | Markup] = ()
    name: str = ""
    """Plain: it ends the names of its charts' files where there are several sections."""


def section_of(
    rows: Sequence[TableRow], block: str, title: str, text: str = "", *, name: str = ""
) -> Section:
    """The metrics of a block with intervals, and its charts."""
    columns = used_columns(rows, (*COLUMNS, *MORE_COLUMNS))
    lines = zip(rows, cells(rows, block, columns), strict=True)
    headings = ["", *(column.heading for column in columns)]
    table = Table(
        caption=title,
        headings=headings,
        rows=[[row.label, *line] for row, line in lines],
    )
    return Section(
        title=title,
        text=text,
        table=table,
        plots=plots_of_block(rows, block),
        name=name,
    )


def plots_of_block(rows: Sequence[TableRow], block: str) -> list[Chart | Bars]:
    """Lengths, accuracy against length, and budget curves, of the rows that have the block."""
    rows = [row for row in rows if row.blocks.get(block)]
    found: list[Chart | Bars] = [_lengths(rows, block)] if len(rows) > 1 else []
    if rows and len(rows) <= _SCATTER:
        found += [_scatter(rows, block), *_at_budgets(rows, block)]
    return found


def _lengths(rows: Sequence[TableRow], block: str) -> Bars:
    bars = []
    for row in rows:
        value = row.blocks[block]["mean_tokens"].value
        low, high = _ends(row, block, "mean_tokens") or (None, None)
        bars.append(
            Bar(
                label=row.label,
                value=value,
                text=f"{value:,.1f}",
                low=low,
                high=high,
                n=row.size(block),
                spread=_spread(row) if low is not None else "",
            )
        )
    return Bars(
        name="lengths",
        title="Mean response tokens",
        x="mean response tokens",
        rows=bars,
    )


def _scatter(rows: Sequence[TableRow], block: str) -> Chart:
    series = []
    for place, row in enumerate(rows):
        x, y = (
            row.blocks[block][metric].value for metric in ("mean_tokens", "accuracy")
        )
        upright, flat = _ends(row, block, "accuracy"), _ends(row, block, "mean_tokens")
        series.append(
            Series(
                label=row.label,
                place=place,
                points=[(x, y)],
                kind="points",
                intervals=[(x, *upright)] if upright else [],
                across=[(y, *flat)] if flat else [],
                n=row.size(block),
                spread=_spread(row) if upright or flat else "",
            )
        )
    return Chart(
        name="accuracy_length",
        title="Accuracy against mean response tokens",
        x="mean response tokens",
        y="accuracy",
        series=series,
        show=percent,
    )


def _at_budgets(rows: Sequence[TableRow], block: str) -> list[Chart]:
    """A chart of each metric that some row has at token budgets."""
    found = []
    for metric, name in (
        ("accuracy", "accuracy"),
        ("mean_tokens", "mean tokens"),
        ("norm_std", "NormStd"),
    ):
        series = [_curve(row, place, block, metric) for place, row in enumerate(rows)]
        if drawn := [one for one in series if one.points]:
            found.append(
                Chart(
                    name=f"{metric}_at_budget",
                    title=f"{name[0].upper()}{name[1:]} at a token budget",
                    x="token budget",
                    y=name,
                    series=drawn,
                    show=percent if metric == "accuracy" else number,
                    from_zero=True,
                    log_x=True,
                )
            )
    return found


def _curve(row: TableRow, place: int, block: str, metric: str) -> Series:
    """A metric of a row over its token budgets; without points where it has none."""
    budgets = row.budgets.get(block, ())
    deviations = row.budget_deviations.get(block) or [{}] * len(budgets)
    points, intervals = [], []
    for (budget, metrics), deviation in zip(budgets, deviations, strict=True):
        if metric in metrics:
            points.append((float(budget), metrics[metric].value))
            if ends := _around(metrics[metric], deviation.get(metric)):
                intervals.append((float(budget), *ends))
    return Series(
        label=row.label,
        place=place,
        points=points,
        intervals=intervals,
        n=row.size(block),
        spread=_spread(row) if intervals else "",
    )


def _ends(row: TableRow, block: str, metric: str) -> tuple[float, float] | None:
    """Ends of the whisker of a metric; None where it has none."""
    deviation = row.deviations.get(block, {}).get(metric)
    return _around(row.blocks[block][metric], deviation)


def _around(estimate: Estimate, deviation: float | None) -> tuple[float, float] | None:
    if deviation is not None:
        return estimate.value - deviation, estimate.value + deviation
    if estimate.low is None or estimate.high is None:
        return None
    return estimate.low, estimate.high


def _spread(row: TableRow) -> str:
    return _OF_SEEDS if row.seeds > 1 else OVER_PROBLEMS


def table_of_runs(runs: Sequence[Run]) -> Table:
    """State and what became of length and accuracy, a run a row."""
    rows: list[list[Cell | str]] = []
    for run in runs:
        ends: list[Cell | str] = [
            Cell(value=f"{one.before} to {one.after}", around=f"({one.change})")
            for one in changes_of(run)[:2]
        ]
        accepted = run.points("accept_rate")
        seconds = [line["step_seconds"] for line in run.steps]
        rows.append(
            [
                *(run.name, run.state),
                *(ends if len(ends) == 2 else ["–", "–"]),
                percent(accepted[-1][1]) if accepted else "–",
                number(sum(seconds) / len(seconds) if seconds else None),
            ]
        )
    headings = [
        "run",
        "state",
        "mean response tokens",
        "accuracy",
        "accepted, last",
        "s a step",
    ]
    return Table(caption="Runs", headings=headings, rows=rows)


def example_of(
    first: Mapping[str, Any], last: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """A response before and after: of the first and the last step of a run's responses (both the
    same), or of two evaluations' first benchmark. The pair of one problem whose length changed by
    the median; where no problem is in both, the two of median length. Empty where there are none.
    """
    if not first["rows"] or not last["rows"]:
        return []
    begin = first["rows"][0][0]
    end = last["rows"][-1][0] if first is last else begin
    before, after = _rows_at(first, begin), _rows_at(last, end)
    if not before or not after or (first is last and begin == end):
        return []
    pairs = [(before[key], after[key]) for key in before if key in after]
    pairs.sort(key=lambda pair: pair[0]["num_tokens"] - pair[1]["num_tokens"])
    return (
        list(pairs[len(pairs) // 2]) if pairs else [_typical(before), _typical(after)]
    )


def _rows_at(
    rollouts: Mapping[str, Any], step: Any
) -> dict[tuple[str, int], dict[str, Any]]:
    found = {}
    for values in rollouts["rows"]:
        row = dict(zip(rollouts["fields"], values, strict=False))
        row["problem"], row["gold"] = rollouts["problems"].get(
            row["problem_id"], (None, None)
        )
        if row["step"] == step and isinstance(row["num_tokens"], int):  # else damaged
            found[row["problem_id"], row["sample_index"]] = row
    return found


def _typical(rows: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    return sorted(rows.values(), key=lambda row: row["num_tokens"])[len(rows) // 2]
