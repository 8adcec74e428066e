"""Charts of runs: their metrics and evaluations over the steps."""

import re
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

from markupsafe import Markup

from megatron_opsft.commands.report.chart import Chart, Series
from megatron_opsft.commands.report.runs import Run
from megatron_opsft.runtime.formatting import count_of, number, percent


class _Curve(NamedTuple):
    """A metric that becomes a chart; `show` and `from_zero` are as in `Chart`."""

    title: str
    key: str
    """Key of metrics.jsonl, and base name of the chart's files; "" without one."""
    held_out_key: str = ""
    """Key of evals.jsonl; "" without one."""
    unit: str = ""
    show: Callable[[float], str] = number
    from_zero: bool = False
    count_key: str = "num_rollouts"
    """Key of metrics.jsonl with the number of observations behind a point; "" without one."""


_TOKENS = "trained_tokens"
_CURVES = (
    _Curve("Mean response tokens", "mean_response_tokens", "eval_mean_response_tokens"),
    _Curve(
        "Accuracy",
        "accuracy",
        "eval_accuracy",
        show=percent,
    ),
    _Curve(
        "Accepted responses",
        "accept_rate",
        show=percent,
    ),
    _Curve(
        "Cut off at the limit",
        "truncated_share",
        show=percent,
    ),
    _Curve(
        "Loss",
        "loss",
        count_key=_TOKENS,
    ),
    _Curve(
        "Gradient norm",
        "grad_norm",
        from_zero=True,
        count_key=_TOKENS,
    ),
    _Curve("Mean reward", "reward_mean"),
    _Curve(
        "Learning rate",
        "lr",
        from_zero=True,
        count_key="",
    ),
    _Curve(
        "Log-prob difference, engine against trainer: mean",
        "logprob_diff_mean",
        unit="nats",
        count_key="",
    ),
    _Curve(
        "Log-prob difference: largest",
        "logprob_diff_max",
        unit="nats",
        count_key="",
    ),
    _Curve(
        "Divergence from the reference model",
        "kl_mean",
        unit="nats",
        count_key=_TOKENS,
    ),
    _Curve(
        "Trained tokens",
        _TOKENS,
        from_zero=True,
        count_key="",
    ),
)
_NUM_AT_TOP = 3  # so many of the first curves are at the top of the page


def curves_of(
    runs: Sequence[Run],
) -> tuple[list[Chart | Markup], list[Chart | Markup]]:
    """Return the charts at the top of the page, and all others.

    A chart of a metric has a colour for each run; seconds by phase are a chart for each run. What
    was measured at a single step is no curve: a sentence takes the place of its chart.
    """
    curves = list(_CURVES)
    all_sets = chain.from_iterable(run.more_sets for run in runs)
    for name in dict.fromkeys(all_sets):
        length, accuracy = f"eval_{name}_mean_response_tokens", f"eval_{name}_accuracy"
        curves.append(_Curve(f"Mean response tokens, {name}", "", length))
        curves.append(_Curve(f"Accuracy, {name}", "", accuracy, show=percent))
    charts = [_chart_of(curve, runs) for curve in curves]
    charts += [_seconds_of(run, has_many_runs=len(runs) > 1) for run in runs]
    top = [_drawn_or_said(chart) for chart in charts[:_NUM_AT_TOP] if chart]
    others = [_drawn_or_said(chart) for chart in charts[_NUM_AT_TOP:] if chart]
    return top, others


def _drawn_or_said(chart: Chart) -> Chart | Markup:
    """Return the chart, or a paragraph with its numbers if all of them are of one step."""
    steps: set[float] = set()
    for series in chart.series:
        steps.update(step for step, _ in series.points)
    if len(steps) > 1:
        return chart
    values = []
    for series in chart.series:
        value = chart.show(series.points[0][1])
        values.append(f"{series.label} {value}" if series.label else value)
    said = f"{chart.title} at step {steps.pop()}: {', '.join(values)}"
    return Markup("<p>{}</p>").format(said)


def _chart_of(curve: _Curve, runs: Sequence[Run]) -> Chart | None:
    """Return the curve of every run in one chart; None if no run has a point of it."""
    # eval_accuracy -> eval_samples
    samples_key = re.sub(
        "(accuracy|mean_response_tokens)$", "samples", curve.held_out_key
    )
    all_series: list[Series] = []
    for index, run in enumerate(runs):
        label, held_out_label = run.name, f"{run.name}, held-out"
        if len(runs) == 1:  # its name would say nothing
            label = "training rollouts" if curve.held_out_key else ""
            held_out_label = "held-out problems"
        series = _series_of(run, curve.key, label, index, count_key=curve.count_key)
        held_out = _series_of(
            run, curve.held_out_key, held_out_label, index, count_key=samples_key
        )
        all_series += filter(None, [series, held_out])
    if not all_series:
        return None
    y = f"{curve.title[0].lower()}{curve.title[1:]}"
    if curve.unit:
        y = f"{y} ({curve.unit})"
    return Chart(
        name=curve.key or curve.held_out_key,
        title=curve.title,
        y=y,
        series=all_series,
        show=curve.show,
        from_zero=curve.from_zero,
    )


def _series_of(
    run: Run, key: str, label: str, style_index: int, *, count_key: str = ""
) -> Series | None:
    """Return the points of a key; None if the run has none.

    count_key: the key of the number of observations behind each point. If there is such a number, n
    is, for example, "256 responses in each of 24 steps", otherwise "24 steps".
    """
    points = run.points(key)
    if not points:
        return None
    kind, unit = "curve", "steps"
    if key.startswith("eval_"):
        kind, unit = "held", "evaluations"
    n = f"{len(points):,} {unit}"
    drawn_steps = dict(points)
    counts = [count for step, count in run.points(count_key) if step in drawn_steps]
    if counts:
        counted = "trained tokens" if count_key == _TOKENS else "responses"
        n = f"{count_of(counts)} {counted} in each of {n}"
    return Series(label=label, style_index=style_index, points=points, kind=kind, n=n)


def _seconds_of(run: Run, *, has_many_runs: bool) -> Chart | None:
    """Return the seconds of each phase over the steps; None if the run has no step."""
    all_keys = dict.fromkeys(chain.from_iterable(run.steps))
    keys = [key for key in all_keys if key.endswith("_seconds")]
    all_series = []
    for index, key in enumerate(keys):
        label = key.removesuffix("_seconds").replace("_", " ")
        if series := _series_of(run, key, label, index):
            all_series.append(series)
    if not all_series:
        return None
    name, title = "seconds", "Seconds by phase"
    if has_many_runs:
        name, title = f"seconds_{run.name}", f"Seconds by phase: {run.name}"
    return Chart(
        name=name,
        title=title,
        y="seconds of a step",
        series=all_series,
        from_zero=True,
    )
