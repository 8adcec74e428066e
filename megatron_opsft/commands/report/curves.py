"""Charts of runs: their metrics and evaluations over the steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from megatron_opsft.commands.report.chart import Chart, Series
from megatron_opsft.commands.report.runs import Run
from megatron_opsft.runtime.formatting import count_of, number, percent


@dataclass(frozen=True, slots=True, kw_only=True)
class _Curve:
    """A metric that becomes a chart."""

    title: str
    train_key: str
    """Key of metrics.jsonl, and base name of the chart's files; "" without one."""
    held_out_key: str = ""
    """Key of evals.jsonl; "" without one."""
    unit: str = ""
    show: Callable[[float], str] = number
    """Formats values."""
    from_zero: bool = False
    """Whether the vertical axis begins at 0."""
    count_key: str = "num_rollouts"
    """Key of metrics.jsonl with the number of observations behind a point; "" without one."""


_OBSERVATIONS = {"num_rollouts": "responses", "trained_tokens": "trained tokens"}
"""`_Curve.count_key` -> what it counts."""
_CURVES = (
    _Curve(
        title="Mean response tokens",
        train_key="mean_response_tokens",
        held_out_key="eval_mean_response_tokens",
    ),
    _Curve(
        title="Accuracy",
        train_key="accuracy",
        held_out_key="eval_accuracy",
        show=percent,
    ),
    _Curve(title="Accepted responses", train_key="accept_rate", show=percent),
    _Curve(title="Cut off at the limit", train_key="truncated_share", show=percent),
    _Curve(title="Loss", train_key="loss", count_key="trained_tokens"),
    _Curve(
        title="Gradient norm",
        train_key="grad_norm",
        from_zero=True,
        count_key="trained_tokens",
    ),
    _Curve(title="Mean reward", train_key="reward_mean"),
    _Curve(title="Learning rate", train_key="lr", from_zero=True, count_key=""),
    _Curve(
        title="Log-prob difference, engine against trainer: mean",
        train_key="logprob_diff_mean",
        unit="nats",
        count_key="",
    ),
    _Curve(
        title="Log-prob difference: largest",
        train_key="logprob_diff_max",
        unit="nats",
        count_key="",
    ),
    _Curve(
        title="Divergence from the reference model",
        train_key="kl_mean",
        unit="nats",
        count_key="trained_tokens",
    ),
    _Curve(
        title="Trained tokens", train_key="trained_tokens", from_zero=True, count_key=""
    ),
)
_NUM_AT_TOP = 3
"""How many of the first curves are at the top of the page."""


def curves_of(runs: Sequence[Run]) -> tuple[list[Chart], list[Chart]]:
    """Return the charts at the top of the page, and all others.

    A chart of a metric has a colour for each run; seconds by phase are a chart for each run.
    """
    curves = list(_CURVES)
    all_sets = chain.from_iterable(run.more_sets for run in runs)
    for name in dict.fromkeys(all_sets):
        curves += [
            _Curve(
                title=f"Mean response tokens, {name}",
                train_key="",
                held_out_key=f"eval_{name}_mean_response_tokens",
            ),
            _Curve(
                title=f"Accuracy, {name}",
                train_key="",
                held_out_key=f"eval_{name}_accuracy",
                show=percent,
            ),
        ]
    charts = [_chart_of(curve, runs) for curve in curves]
    charts += [_seconds_of(run, has_many_runs=len(runs) > 1) for run in runs]
    top = [chart for chart in charts[:_NUM_AT_TOP] if chart]
    others = [chart for chart in charts[_NUM_AT_TOP:] if chart]
    return top, others


def _chart_of(curve: _Curve, runs: Sequence[Run]) -> Chart | None:
    """Return the curve of every run in one chart; None if no run has a point of it."""
    all_series = []
    for index, run in enumerate(runs):
        if len(runs) > 1:
            train_label, held_out_label = run.name, f"{run.name}, held-out"
        else:
            train_label = "training rollouts" if curve.held_out_key else ""
            held_out_label = "held-out problems"
        if points := run.points(curve.train_key):
            counted = _OBSERVATIONS.get(curve.count_key, "")
            n = _describe_n(run, curve.train_key, curve.count_key, counted)
            all_series.append(
                Series(label=train_label, style_index=index, points=points, n=n)
            )
        if points := run.points(curve.held_out_key):
            prefix = curve.held_out_key.removesuffix("accuracy")
            prefix = prefix.removesuffix("mean_response_tokens")
            n = _describe_n(run, curve.held_out_key, f"{prefix}samples", "responses")
            all_series.append(
                Series(
                    label=held_out_label,
                    style_index=index,
                    points=points,
                    kind="held",
                    n=n,
                )
            )
    if not all_series:
        return None
    name = f"{curve.title[0].lower()}{curve.title[1:]}"
    return Chart(
        name=curve.train_key or curve.held_out_key,
        title=curve.title,
        y=f"{name} ({curve.unit})" if curve.unit else name,
        series=all_series,
        show=curve.show,
        from_zero=curve.from_zero,
    )


def _describe_n(run: Run, key: str, count_key: str, counted: str) -> str:
    """Return, for example, "256 responses in each of 24 steps".

    key: of the points; count_key: of the number of observations behind each; counted: what these
    are. Without a number it is "24 steps".
    """
    points = run.points(key)
    unit = "evaluations" if key.startswith("eval_") else "steps"
    steps = f"{len(points):,} {unit}"
    drawn_steps = {step for step, _ in points}
    counts = []
    for step, count in run.points(count_key):
        if step in drawn_steps:
            counts.append(count)
    return f"{count_of(counts)} {counted} in each of {steps}" if counts else steps


def _seconds_of(run: Run, *, has_many_runs: bool) -> Chart | None:
    """Return the seconds of each phase over the steps; None if the run has no step."""
    all_keys = dict.fromkeys(chain.from_iterable(run.steps))
    keys = [key for key in all_keys if key.endswith("_seconds")]
    all_series = []
    for index, key in enumerate(keys):
        if points := run.points(key):
            all_series.append(
                Series(
                    label=key.removesuffix("_seconds").replace("_", " "),
                    style_index=index,
                    points=points,
                    n=_describe_n(run, key, "", ""),
                )
            )
    if not all_series:
        return None
    return Chart(
        name=f"seconds_{run.name}" if has_many_runs else "seconds",
        title=f"Seconds by phase: {run.name}" if has_many_runs else "Seconds by phase",
        y="seconds of a step",
        series=all_series,
        from_zero=True,
    )
