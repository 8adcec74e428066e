"""Sections of a page: tables and charts of runs and evaluations, and a problem before and after."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from markupsafe import Markup

from megatron_opsft.commands.report.chart import (
    Bar,
    Bars,
    Chart,
    Picture,
    Series,
    Whisker,
)
from megatron_opsft.commands.report.runs import Change, Run, changes_of
from megatron_opsft.commands.report.sampling import problem_key
from megatron_opsft.commands.report.table import (
    COLUMNS,
    MORE_COLUMNS,
    Cell,
    Table,
    TableRow,
    cells,
    title_of,
    used_columns,
)
from megatron_opsft.records import JsonObject, record
from megatron_opsft.run.record.advice import warn_of_cut_off
from megatron_opsft.runtime.formatting import number, percent

T = TypeVar("T")
_MAX_COLOURS = 7  # more rows of a chart could not be told apart
OVER_PROBLEMS = "95 % intervals, bootstrap over problems"
_OVER_SEEDS = "standard deviation over seeds"
# Metric -> its name in charts over token budgets.
_BUDGET_METRICS = {
    "accuracy": "accuracy",
    "mean_tokens": "mean tokens",
    "norm_std": "NormStd",
}


@record
class PageSection:
    """A heading of a page with a table and charts below it."""

    title: str
    text: str = ""
    """Sentences below the title."""
    table: Table | None = None
    plots: Sequence[Picture | Markup] = ()
    """Pictures, or finished HTML."""
    name: str = ""
    """Ends the file names of its charts if there are several sections."""


def page_section_of(
    rows: Sequence[TableRow], block: str, title: str, text: str = "", *, name: str = ""
) -> PageSection:
    """Return the metrics of a block with intervals, and its charts."""
    columns = used_columns(rows, (*COLUMNS, *MORE_COLUMNS))
    lines = zip(rows, cells(rows, block, columns), strict=True)
    table = Table(
        caption=title,
        headings=["", *(column.heading for column in columns)],
        rows=[[row.label, *line] for row, line in lines],
    )
    plots = plots_of_block(rows, block)
    return PageSection(title=title, text=text, table=table, plots=plots, name=name)


def warn_of_limit(rows: Sequence[TableRow], blocks: Sequence[str]) -> str:
    """Warn of rows of which the token limit of an evaluation cut responses off, as a run warns of
    its own; "" if it cut off few.
    """
    shares = {}
    for row in rows:
        for block in blocks:
            if share := row.blocks.get(block, {}).get("truncated_share"):
                names = [row.label] if len(rows) > 1 else []
                names += [title_of(block)] if len(blocks) > 1 else []
                shares[", ".join(names)] = share.value
    warning = warn_of_cut_off(shares, "max_tokens")
    if warning and len(rows) > 1:
        warning += "; until then the limit dominates this comparison"
    return f"{warning}." if warning else ""


def plots_of_block(rows: Sequence[TableRow], block: str) -> list[Chart | Bars]:
    """Return charts of the rows that have the block: lengths, accuracy against length, and metrics
    at token budgets.
    """
    rows = [row for row in rows if row.blocks.get(block)]
    plots: list[Chart | Bars] = []
    if len(rows) > 1:
        plots.append(_lengths(rows, block))
    if 0 < len(rows) <= _MAX_COLOURS:
        if len(rows) > 1:  # one point is in the table
            plots.append(_accuracy_against_length(rows, block))
        charts = [_at_budgets(rows, block, metric) for metric in _BUDGET_METRICS]
        plots += filter(None, charts)
    return plots


def _lengths(rows: Sequence[TableRow], block: str) -> Bars:
    bars = []
    for row in rows:
        length = row.blocks[block]["mean_tokens"]
        bars.append(
            Bar(
                label=row.label,
                value=length.value,
                text=f"{length.value:,.1f}",
                interval=length.interval,
                n=row.size(block),
                spread=_spread(row, length.interval),
            )
        )
    return Bars(
        name="lengths",
        title="Mean response tokens",
        x="mean response tokens",
        rows=bars,
    )


def _accuracy_against_length(rows: Sequence[TableRow], block: str) -> Chart:
    all_series = []
    for index, row in enumerate(rows):
        length = row.blocks[block]["mean_tokens"]
        accuracy = row.blocks[block]["accuracy"]
        x, y = length.value, accuracy.value
        whiskers = []
        if accuracy.interval:
            whiskers.append(Whisker((x, x), accuracy.interval))
        if length.interval:
            whiskers.append(Whisker(length.interval, (y, y), cap="|"))
        all_series.append(
            Series(
                label=row.label,
                style_index=index,
                points=[(x, y)],
                kind="points",
                whiskers=whiskers,
                n=row.size(block),
                spread=_spread(row, whiskers),
            )
        )
    return Chart(
        name="accuracy_length",
        title="Accuracy against mean response tokens",
        x="mean response tokens",
        y="accuracy",
        series=all_series,
        show=percent,
    )


def _at_budgets(rows: Sequence[TableRow], block: str, metric: str) -> Chart | None:
    """Return a chart of a metric over token budgets; None if no row has it at two budgets."""
    all_series = [
        _series_at_budgets(row, index, block, metric) for index, row in enumerate(rows)
    ]
    all_series = [series for series in all_series if series.points]
    if max((len(series.points) for series in all_series), default=0) < 2:
        return None
    name = _BUDGET_METRICS[metric]
    return Chart(
        name=f"{metric}_at_budget",
        title=f"{name[0].upper()}{name[1:]} at a token budget",
        x="token budget",
        y=name,
        series=all_series,
        show=percent if metric == "accuracy" else number,
        from_zero=True,
        log_x=True,
    )


def _series_at_budgets(
    row: TableRow, style_index: int, block: str, metric: str
) -> Series:
    """Return a metric of a row over its token budgets; no points if the row does not have it."""
    points, whiskers = [], []
    for budget, metrics in row.budgets.get(block, ()):
        if estimate := metrics.get(metric):
            points.append((float(budget), estimate.value))
            if estimate.interval:
                whiskers.append(Whisker((budget, budget), estimate.interval))
    return Series(
        label=row.label,
        style_index=style_index,
        points=points,
        whiskers=whiskers,
        n=row.size(block),
        spread=_spread(row, whiskers),
    )


def _spread(row: TableRow, intervals: Sequence[object] | None) -> str:
    """Return what the intervals of a row are; "" if it has none."""
    if not intervals:
        return ""
    return _OVER_SEEDS if row.seeds > 1 else OVER_PROBLEMS


def table_of_runs(runs: Sequence[Run]) -> Table:
    """Return a line for each run: its state, and how length and accuracy changed."""
    rows = []
    for run in runs:
        changes: list[Cell | str] = []
        for change in changes_of(run)[:2]:
            cell: Cell | str = change.before
            if change.after:
                both = f"{change.before} to {change.after}"
                cell = Cell(value=both, around=_around(change))
            changes.append(cell)
        if len(changes) < 2:
            changes = ["–", "–"]
        accepted_share = mean_seconds = "–"
        if accepted := run.points("accept_rate"):
            accepted_share = percent(accepted[-1][1])
        if run.steps:
            seconds = sum(line["step_seconds"] for line in run.steps)
            mean_seconds = number(seconds / len(run.steps))
        rows.append([run.name, run.state, *changes, accepted_share, mean_seconds])
    headings = [
        "run",
        "state",
        "mean response tokens",
        "accuracy",
        "accepted, last",
        "s a step",
    ]
    return Table(caption="Runs", headings=headings, rows=rows)


def _around(change: Change) -> str:
    """Return the difference with its evidence, in brackets."""
    return f"({'; '.join(filter(None, [change.change, change.evidence]))})"


def example_of(first: Mapping[str, Any], last: Mapping[str, Any]) -> list[JsonObject]:
    """Return a response before and one after, as field -> value; empty if there is none.

    They answer the same problem: the one whose length changed by the median. If no problem has a
    response on both sides, they are the responses of median length.

    first, last: what `sampling.sample_responses` returned. If they are the same object (a run's),
    its first and last step are compared; otherwise the first benchmark of two evaluations.
    """
    if not first["rows"] or not last["rows"]:
        return []
    first_step = last_step = first["rows"][0][0]
    if first is last:
        last_step = last["rows"][-1][0]
        if first_step == last_step:
            return []
    before, after = _rows_at(first, first_step), _rows_at(last, last_step)
    if not before or not after:
        return []
    pairs = [[before[key], after[key]] for key in before if key in after]
    if pairs:
        return _median(
            pairs, lambda pair: pair[0]["num_tokens"] - pair[1]["num_tokens"]
        )
    return [
        _median(rows.values(), lambda row: row["num_tokens"])
        for rows in (before, after)
    ]


def _rows_at(
    rollouts: Mapping[str, Any], step: Any
) -> dict[tuple[str, int], JsonObject]:
    """Return the undamaged responses of a step or benchmark as field -> value, by problem and
    number of the sample.
    """
    rows = {}
    for values in rollouts["rows"]:
        row = {"parts": None, **dict(zip(rollouts["fields"], values, strict=False))}
        problem_id = row["problem_id"]
        problem = rollouts["problems"].get(problem_key(row["step"], problem_id))
        row["problem"], row["gold"] = problem or (None, None)
        if row["step"] == step and isinstance(row["num_tokens"], int):
            rows[problem_id, row["sample_index"]] = row
    return rows


def _median(items: Collection[T], key: Callable[[T], int]) -> T:
    return sorted(items, key=key)[len(items) // 2]
