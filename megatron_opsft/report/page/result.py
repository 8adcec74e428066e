"""What a page begins with: before and after in large figures, curves, a problem twice."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from megatron_opsft.report.before_after import before_and_after
from megatron_opsft.report.page.plot import Series, number, percent, plot
from megatron_opsft.report.page.run_data import RunData
from megatron_opsft.report.table import COLUMNS, Cell, TableRow

_UP_TO_ONE = {"show": percent, "ends": (0.0, 1.0)}
# title, key of metrics, key of evaluations, how it is drawn; the first three stand at the top.
_CURVES: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("Mean response tokens", *("mean_response_tokens", "eval_mean_response_tokens"), {}),
    ("Accuracy", "accuracy", "eval_accuracy", _UP_TO_ONE),
    ("Accepted responses", "accept_rate", "", _UP_TO_ONE),
    ("Cut off at the limit", "truncated_share", "", _UP_TO_ONE),
    ("Loss", "loss", "", {}),
    ("Gradient norm", "grad_norm", "", {"from_zero": True}),
    ("Mean reward", "reward_mean", "", {}),
    ("Learning rate", "lr", "", {"from_zero": True}),
    ("Log-prob difference, engine against trainer: mean", "logprob_diff_mean", "", {}),
    ("Log-prob difference: largest", "logprob_diff_max", "", {}),
    ("Divergence from the reference model", "kl_mean", "", {}),
    ("Trained tokens", "trained_tokens", "", {"from_zero": True}),
)
_AT_TOP = 3
_TOKENS = next(column for column in COLUMNS if column.metric == "mean_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class BigFigure:
    """A quantity before and after; is_better: of the change."""

    title: str
    before: str
    after: str
    change: str
    is_better: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """headings: the first is of the names of the rows."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]


def figures_of_run(run: RunData) -> list[BigFigure]:
    """First and last evaluation, on each set; without two, first and last step's rollouts."""
    found = before_and_after(run.evaluations)
    sets = {"": found, **{f", {name}": more for name, more in found["more"].items()}}
    if len(run.evaluations) < 2:
        ends = {name: run.steps[place] for name, place in (("base", 0), ("final", -1)) if run.steps}
        sets = {" in training": ends} if ends else {}
    return [
        figure
        for name, ends in sets.items()
        for figure in _figures(name, ends, "mean_response_tokens")
    ]


def figures_of_rows(before: TableRow, after: TableRow, block: str) -> list[BigFigure]:
    """Two rows of a table: a model and what it was made of."""
    ends = {
        end: {name: estimate.value for name, estimate in row.blocks[block].items()}
        for end, row in (("base", before), ("final", after))
    }
    return _figures(f", {before.label} to {after.label}", ends, "mean_tokens")


def _figures(name: str, ends: Mapping[str, Any], length: str) -> list[BigFigure]:
    """Tokens and accuracy; none of what was not measured at both ends. length: its key."""
    found = []
    for title, key in (("Mean response tokens", length), ("Accuracy", "accuracy")):
        before, after = (ends[end].get(key) for end in ("base", "final"))
        if before is None or after is None or (key == length and not before):
            continue
        change = f"{100 * (after / before - 1):+.1f} %" if key == length else ""
        found.append(
            BigFigure(
                title=f"{title}{name}",
                before=_TOKENS.text(before) if change else percent(before),
                after=_TOKENS.text(after) if change else percent(after),
                change=change or f"{100 * (after - before):+.1f} points",
                is_better=after <= before if change else after >= before,
            )
        )
    return found


def table_of_runs(runs: Sequence[RunData]) -> Table:
    """State and what became of length and accuracy, a run a row."""
    rows: list[list[Cell | str]] = []
    for run in runs:
        figures = figures_of_run(run)[:2]
        cells: list[Cell | str] = [
            Cell(value=f"{f.before} to {f.after}", around=f"({f.change})") for f in figures
        ]
        seconds = [line.get("step_seconds") or 0 for line in run.steps]
        rows.append(
            [
                *(run.name, run.state),
                *(cells if len(cells) == 2 else ["–", "–"]),
                percent(run.last("accept_rate")),
                number(sum(seconds) / len(seconds)) if seconds else "–",
            ]
        )
    headings = ["run", "state", "mean response tokens", "accuracy", "accepted, last", "s a step"]
    return Table(caption="Runs", headings=headings, rows=rows)


def curves_of(runs: Sequence[RunData]) -> tuple[list[Markup], list[Markup]]:
    """Pictures of the top, and all others: a run a colour; seconds by phase, a run a picture."""
    sets = dict.fromkeys(
        name
        for run in runs
        for line in run.evaluations
        for name in before_and_after([line])["more"]
    )
    more = [
        entry
        for name in sets
        for entry in (
            (f"Mean response tokens, {name}", "", f"eval_{name}_mean_response_tokens", {}),
            (f"Accuracy, {name}", "", f"eval_{name}_accuracy", _UP_TO_ONE),
        )
    ]
    drawn = [
        [plot(title, series, **how)] if (series := _series(runs, train, held)) else []
        for title, train, held, how in (*_CURVES, *more)
    ]
    drawn += [[figure] if (figure := _phases(run, len(runs) > 1)) else [] for run in runs]
    top, others = drawn[:_AT_TOP], drawn[_AT_TOP:]
    return [p for found in top for p in found], [p for found in others for p in found]


def _series(runs: Sequence[RunData], train: str, held: str) -> list[Series]:
    many = len(runs) > 1
    found = []
    for place, run in enumerate(runs):
        if points := run.points(train) if train else []:
            label = run.name if many else "training rollouts" if held else ""
            found.append(Series(label=label, place=place, points=points))
        if points := run.points(held) if held else []:
            label = f"{run.name}, held-out" if many else "held-out problems"
            found.append(Series(label=label, place=place, points=points, kind="held"))
    return found


def _phases(run: RunData, many: bool) -> Markup | None:
    keys = dict.fromkeys(key for line in run.steps for key in line if key.endswith("_seconds"))
    series = [
        Series(
            label=key.removesuffix("_seconds").replace("_", " "), place=n, points=run.points(key)
        )
        for n, key in enumerate(keys)
    ]
    title = f"Seconds by phase: {run.name}" if many else "Seconds by phase"
    return plot(title, series, from_zero=True) if series else None


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
    if not after or (first is last and begin == end):
        return []
    same = {(row["problem_id"], row["sample_index"]): row for row in after}
    pairs = [
        (row, same[key])
        for row in before
        if (key := (row["problem_id"], row["sample_index"])) in same
    ]
    pairs.sort(key=lambda pair: pair[0]["num_tokens"] - pair[1]["num_tokens"])
    return list(pairs[len(pairs) // 2]) if pairs else [_typical(before), _typical(after)]


def _rows_at(rollouts: Mapping[str, Any], step: Any) -> list[dict[str, Any]]:
    found = []
    for values in rollouts["rows"]:
        row = dict(zip(rollouts["fields"], values, strict=False))
        row["problem"], row["gold"] = rollouts["problems"].get(row["problem_id"], (None, None))
        if row["step"] == step:
            found.append(row)
    return found


def _typical(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return sorted(rows, key=lambda row: row["num_tokens"])[len(rows) // 2]
