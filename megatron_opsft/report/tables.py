"""What a page shows of runs and evaluations: tables, pictures, and a problem before and after."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from megatron_opsft.report.plot import Figure, Series, bars, number, percent, plot
from megatron_opsft.report.runs import Run, changes_of
from megatron_opsft.report.table import (
    COLUMNS,
    MORE_COLUMNS,
    Cell,
    Estimate,
    TableRow,
    cells,
    used_columns,
)

_SCATTER = 7  # rows that colours tell apart
_AT_BUDGETS = {"accuracy": "Accuracy", "mean_tokens": "Mean tokens", "norm_std": "NormStd"}
_SHARE = {"show": percent}
_FROM_ZERO = {"from_zero": True}
# title, key of metrics, key of evaluations, how it is drawn; the first three stand at the top.
_CURVES: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("Mean response tokens", "mean_response_tokens", "eval_mean_response_tokens", {}),
    ("Accuracy", "accuracy", "eval_accuracy", _SHARE),
    ("Accepted responses", "accept_rate", "", _SHARE),
    ("Cut off at the limit", "truncated_share", "", _SHARE),
    ("Loss", "loss", "", {}),
    ("Gradient norm", "grad_norm", "", _FROM_ZERO),
    ("Mean reward", "reward_mean", "", {}),
    ("Learning rate", "lr", "", _FROM_ZERO),
    ("Log-prob difference, engine against trainer: mean", "logprob_diff_mean", "", {}),
    ("Log-prob difference: largest", "logprob_diff_max", "", {}),
    ("Divergence from the reference model", "kl_mean", "", {}),
    ("Trained tokens", "trained_tokens", "", _FROM_ZERO),
)
_AT_TOP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """headings: the first is of the names of the rows."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A table with its pictures: a benchmark of evaluations, a section of a study, or a part of a
    diagnosis.
    """

    title: str
    text: str
    table: Table | None = None
    plots: Sequence[Figure | Markup] = ()


def section_of(rows: Sequence[TableRow], block: str, title: str, text: str = "") -> Section:
    """The metrics of a block with intervals, and its pictures."""
    columns = used_columns(rows, (*COLUMNS, *MORE_COLUMNS))
    lines = zip(rows, cells(rows, block, columns), strict=True)
    headings = ["", *(column.heading for column in columns)]
    table = Table(
        caption=title, headings=headings, rows=[[row.label, *line] for row, line in lines]
    )
    return Section(title=title, text=text, table=table, plots=plots_of_block(rows, block))


def plots_of_block(rows: Sequence[TableRow], block: str) -> list[Figure]:
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


def _scatter(rows: Sequence[TableRow], block: str) -> Figure:
    series = [
        _series(row.label, place, [(own["mean_tokens"].value, own["accuracy"])], "points")
        for place, row in enumerate(rows)
        for own in [row.blocks[block]]
    ]
    return plot("Accuracy against mean response tokens", series, x="tokens", show=percent)


def _series(label: str, place: int, at: Sequence[tuple[float, Estimate]], kind: str) -> Series:
    """at: (x, estimate); whiskers are intervals."""
    return Series(
        label=label,
        place=place,
        points=[(x, estimate.value) for x, estimate in at],
        kind=kind,
        intervals=[(x, e.low, e.high) for x, e in at if e.low is not None and e.high is not None],
    )


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
    headings = ["run", "state", "mean response tokens", "accuracy", "accepted, last", "s a step"]
    return Table(caption="Runs", headings=headings, rows=rows)


def curves_of(runs: Sequence[Run]) -> tuple[list[Figure], list[Figure]]:
    """Pictures of the top, and all others: a run a colour; seconds by phase, a run a picture."""
    many = len(runs) > 1
    curves = list(_CURVES)
    for name in dict.fromkeys(name for run in runs for name in run.more_sets):
        curves += [
            (f"Mean response tokens, {name}", "", f"eval_{name}_mean_response_tokens", {}),
            (f"Accuracy, {name}", "", f"eval_{name}_accuracy", _SHARE),
        ]
    drawn = [
        [plot(title, series, **how)] if (series := _series_of_runs(runs, train, held)) else []
        for title, train, held, how in curves
    ]
    for run in runs:
        keys = dict.fromkeys(key for line in run.steps for key in line if key.endswith("_seconds"))
        series = [
            Series(
                label=key.removesuffix("_seconds").replace("_", " "),
                place=place,
                points=run.points(key),
            )
            for place, key in enumerate(keys)
        ]
        title = f"Seconds by phase: {run.name}" if many else "Seconds by phase"
        drawn.append([plot(title, series, from_zero=True)] if series else [])
    return sum(drawn[:_AT_TOP], []), sum(drawn[_AT_TOP:], [])


def _series_of_runs(runs: Sequence[Run], train: str, held: str) -> list[Series]:
    many = len(runs) > 1
    found = []
    for place, run in enumerate(runs):
        label = run.name if many else "training rollouts" if held else ""
        found.append(Series(label=label, place=place, points=run.points(train)))
        label = f"{run.name}, held-out" if many else "held-out problems"
        found.append(Series(label=label, place=place, points=run.points(held), kind="held"))
    return [one for one in found if one.points]


def example_of(first: Mapping[str, Any], last: Mapping[str, Any]) -> list[dict[str, Any]]:
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
    return list(pairs[len(pairs) // 2]) if pairs else [_typical(before), _typical(after)]


def _rows_at(rollouts: Mapping[str, Any], step: Any) -> dict[tuple[str, int], dict[str, Any]]:
    found = {}
    for values in rollouts["rows"]:
        row = dict(zip(rollouts["fields"], values, strict=False))
        row["problem"], row["gold"] = rollouts["problems"].get(row["problem_id"], (None, None))
        if row["step"] == step and isinstance(row["num_tokens"], int):  # else damaged
            found[row["problem_id"], row["sample_index"]] = row
    return found


def _typical(rows: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    return sorted(rows.values(), key=lambda row: row["num_tokens"])[len(rows) // 2]
