"""What a page shows of runs: a table of several, their curves, and a problem before and after."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from megatron_opsft.report.page.plot import Series, number, percent, plot
from megatron_opsft.report.page.tables import Table
from megatron_opsft.report.runs import Run, changes_of
from megatron_opsft.report.table import Cell

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


def curves_of(runs: Sequence[Run]) -> tuple[list[Markup], list[Markup]]:
    """Pictures of the top, and all others: a run a colour; seconds by phase, a run a picture."""
    many = len(runs) > 1
    curves = list(_CURVES)
    for name in dict.fromkeys(name for run in runs for name in run.more_sets):
        curves += [
            (f"Mean response tokens, {name}", "", f"eval_{name}_mean_response_tokens", {}),
            (f"Accuracy, {name}", "", f"eval_{name}_accuracy", _SHARE),
        ]
    drawn = [
        [plot(title, series, **how)] if (series := _series(runs, train, held)) else []
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


def _series(runs: Sequence[Run], train: str, held: str) -> list[Series]:
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
    if not after or (first is last and begin == end):
        return []
    pairs = [(before[key], after[key]) for key in before if key in after]
    pairs.sort(key=lambda pair: pair[0]["num_tokens"] - pair[1]["num_tokens"])
    return list(pairs[len(pairs) // 2]) if pairs else [_typical(before), _typical(after)]


def _rows_at(rollouts: Mapping[str, Any], step: Any) -> dict[tuple[str, int], dict[str, Any]]:
    found = {}
    for values in rollouts["rows"]:
        row = dict(zip(rollouts["fields"], values, strict=False))
        row["problem"], row["gold"] = rollouts["problems"].get(row["problem_id"], (None, None))
        if row["step"] == step:
            found[row["problem_id"], row["sample_index"]] = row
    return found


def _typical(rows: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    return sorted(rows.values(), key=lambda row: row["num_tokens"])[len(rows) // 2]
