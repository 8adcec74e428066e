"""Tables of a page, and the pictures that belong to them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from megatron_opsft.report.page.plot import Series, bars, number, percent, plot
from megatron_opsft.report.table import (
    COLUMNS,
    MORE_COLUMNS,
    OVERALL,
    Cell,
    Estimate,
    TableRow,
    cells,
    title_of,
    used_columns,
)

_SCATTER = 7  # rows that colours tell apart
_AT_BUDGETS = {"accuracy": "Accuracy", "mean_tokens": "Mean tokens", "norm_std": "NormStd"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """headings: the first is of the names of the rows."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A table with its pictures: a benchmark of evaluations, or a section of a study. folded: a
    table that is opened by a click.
    """

    title: str
    text: str
    table: Table
    plots: Sequence[Markup]
    folded: Table | None = None


def sections_of(rows: Sequence[TableRow], sizes: Mapping[str, str]) -> list[Section]:
    """A section a block. sizes: benchmark -> its problems and samples, as text."""
    found = []
    for block, heading, own in blocks_of(rows):
        title = title_of(heading)
        told = [sizes[block]] if block in sizes else []
        told += [f"CR of {r.label}: to the tokens of {r.reference}" for r in own if r.reference]
        text = ". ".join([*told, "In brackets: intervals by bootstrap over problems."])
        table, plots = table_of(own, block, title), plots_of_block(own, block)
        found.append(Section(title=title, text=text, table=table, plots=plots))
    return found


def blocks_of(rows: Sequence[TableRow]) -> list[tuple[str, str, list[TableRow]]]:
    """(block, heading, rows) of what can stand in one table: overall values only of evaluations on
    the same benchmarks; of a single benchmark they are its own.
    """
    found: dict[tuple[str, str], list[TableRow]] = {}
    sets = {tuple(row.blocks) for row in rows}
    for row in rows:
        names = [name for name in row.blocks if name != OVERALL]
        for block in row.blocks:
            heading = block
            if block == OVERALL and len(names) == 1:
                continue
            if block == OVERALL and len(sets) > 1:
                heading = f"overall of {', '.join(names)}"
            found.setdefault((block, heading), []).append(row)
    return [(block, heading, own) for (block, heading), own in found.items()]


def table_of(rows: Sequence[TableRow], block: str, caption: str) -> Table:
    """The metrics of a block, with intervals."""
    only = [replace(row, blocks={block: row.blocks.get(block, {})}) for row in rows]
    columns = used_columns(only, (*COLUMNS, *MORE_COLUMNS))
    lines = zip(rows, cells(rows, block, columns), strict=True)
    return Table(
        caption=caption,
        headings=["", *(column.heading for column in columns)],
        rows=[[row.label, *line] for row, line in lines],
    )


def plots_of_block(rows: Sequence[TableRow], block: str) -> list[Markup]:
    """Lengths, accuracy against length, and budget curves, of the rows that have the block."""
    rows = [row for row in rows if row.blocks.get(block)]
    tokens = [row.blocks[block]["mean_tokens"].value for row in rows]
    lengths = [(row.label, value, f"{value:,.1f}") for row, value in zip(rows, tokens, strict=True)]
    found = [bars("Mean response tokens", lengths)] if len(rows) > 1 else []
    if len(rows) > _SCATTER:
        return found
    found.append(_scatter(rows, block))
    for metric, title in _AT_BUDGETS.items():
        series = []
        for place, row in enumerate(rows):
            at = [(float(b), m[metric]) for b, m in row.budgets.get(block, ()) if metric in m]
            if at:
                series.append(_series(row.label, place, at, "curve"))
        if series:
            show = percent if metric == "accuracy" else number
            title = f"{title} at a token budget"
            found.append(plot(title, series, x="budget", show=show, from_zero=True, log_x=True))
    return found


def _scatter(rows: Sequence[TableRow], block: str) -> Markup:
    metrics = [row.blocks[block] for row in rows]
    points = [(own["mean_tokens"].value, own["accuracy"].value) for own in metrics]
    series = [
        _series(row.label, place, [(own["mean_tokens"].value, own["accuracy"])], "points")
        for place, (row, own) in enumerate(zip(rows, metrics, strict=True))
    ]
    title = "Accuracy against mean response tokens"
    if len(points) > 1:
        title += ", with the Pareto front"
        front = sorted(points[place] for place in pareto_front(points))
        front.append((max(points)[0], front[-1][1]))
        series.append(Series(label="", place=6, points=front, kind="front"))
    return plot(title, series, x="tokens", show=percent)


def _series(label: str, place: int, at: Sequence[tuple[float, Estimate]], kind: str) -> Series:
    """at: (x, estimate); whiskers are intervals."""
    return Series(
        label=label,
        place=place,
        points=[(x, estimate.value) for x, estimate in at],
        kind=kind,
        intervals=[(x, e.low, e.high) for x, e in at if e.low is not None and e.high is not None],
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
