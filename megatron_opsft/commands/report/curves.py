"""Charts of runs: their metrics and evaluations over the steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_opsft.commands.report.chart import Chart, Series
from megatron_opsft.commands.report.runs import Run
from megatron_opsft.runtime.formatting import count_of, number, percent


@dataclass(frozen=True, slots=True, kw_only=True)
class _Curve:
    """A chart of one metric."""

    title: str
    train: str
    """Key of metrics.jsonl; its chart is called so."""
    held: str = ""
    """Key of evals.jsonl; "" without one."""
    unit: str = ""
    show: Callable[[float], str] = number
    from_zero: bool = False
    counted: str = "num_rollouts"
    """Key of metrics.jsonl that says how much a point of it rests on; "" where nothing does."""


_RESPONSES = {"num_rollouts": "responses", "trained_tokens": "trained tokens"}
_CURVES = (
    _Curve(
        title="Mean response tokens",
        train="mean_response_tokens",
        held="eval_mean_response_tokens",
    ),
    _Curve(title="Accuracy", train="accuracy", held="eval_accuracy", show=percent),
    _Curve(title="Accepted responses", train="accept_rate", show=percent),
    _Curve(title="Cut off at the limit", train="truncated_share", show=percent),
    _Curve(title="Loss", train="loss", counted="trained_tokens"),
    _Curve(
        title="Gradient norm",
        train="grad_norm",
        from_zero=True,
        counted="trained_tokens",
    ),
    _Curve(title="Mean reward", train="reward_mean"),
    _Curve(title="Learning rate", train="lr", from_zero=True, counted=""),
    _Curve(
        title="Log-prob difference, engine against trainer: mean",
        train="logprob_diff_mean",
        unit="nats",
        counted="",
    ),
    _Curve(
        title="Log-prob difference: largest",
        train="logprob_diff_max",
        unit="nats",
        counted="",
    ),
    _Curve(
        title="Divergence from the reference model",
        train="kl_mean",
        unit="nats",
        counted="trained_tokens",
    ),
    _Curve(title="Trained tokens", train="trained_tokens", from_zero=True, counted=""),
)
_AT_TOP = 3  # of these


def curves_of(runs: Sequence[Run]) -> tuple[list[Chart], list[Chart]]:
    """Charts of the top, and all others: a run a colour; seconds by phase, a run a chart."""
    curves = list(_CURVES)
    for name in dict.fromkeys(name for run in runs for name in run.more_sets):
        tokens, accuracy = f"eval_{name}_mean_response_tokens", f"eval_{name}_accuracy"
        curves.append(
            _Curve(title=f"Mean response tokens, {name}", train="", held=tokens)
        )
        curves.append(
            _Curve(title=f"Accuracy, {name}", train="", held=accuracy, show=percent)
        )
    drawn = [_chart(curve, runs) for curve in curves]
    top = [chart for chart in drawn[:_AT_TOP] if chart]
    others = [chart for chart in drawn[_AT_TOP:] if chart]
    return top, others + [
        chart for run in runs if (chart := _seconds(run, len(runs) > 1))
    ]


def _chart(curve: _Curve, runs: Sequence[Run]) -> Chart | None:
    """None where no run has a point of it."""
    many = len(runs) > 1
    series = []
    for place, run in enumerate(runs):
        label = run.name if many else "training rollouts" if curve.held else ""
        if points := run.points(curve.train):
            n = _rests_on(
                run, curve.train, curve.counted, _RESPONSES.get(curve.counted, "")
            )
            series.append(Series(label=label, place=place, points=points, n=n))
        label = f"{run.name}, held-out" if many else "held-out problems"
        if points := run.points(curve.held):
            of = curve.held.removesuffix("accuracy").removesuffix(
                "mean_response_tokens"
            )
            n = _rests_on(run, curve.held, f"{of}samples", "responses")
            series.append(
                Series(label=label, place=place, points=points, kind="held", n=n)
            )
    if not series:
        return None
    name = f"{curve.title[0].lower()}{curve.title[1:]}"
    return Chart(
        name=curve.train or curve.held,
        title=curve.title,
        y=f"{name} ({curve.unit})" if curve.unit else name,
        series=series,
        show=curve.show,
        from_zero=curve.from_zero,
    )


def _rests_on(run: Run, key: str, counted: str, what: str) -> str:
    """Such as "256 responses in each of 24 steps". counted: key of their number."""
    points = run.points(key)
    steps = f"{len(points):,} {'evaluations' if key.startswith('eval_') else 'steps'}"
    at = {step for step, _ in points}
    counts = (
        [count for step, count in run.points(counted) if step in at] if counted else []
    )
    return f"{count_of(counts)} {what} in each of {steps}" if counts else steps


def _seconds(run: Run, many: bool) -> Chart | None:
    keys = dict.fromkeys(
        key for line in run.steps for key in line if key.endswith("_seconds")
    )
    series = [
        Series(
            label=key.removesuffix("_seconds").replace("_", " "),
            place=place,
            points=points,
            n=_rests_on(run, key, "", ""),
        )
        for place, key in enumerate(keys)
        if (points := run.points(key))
    ]
    if not series:
        return None
    return Chart(
        name=f"seconds_{run.name}" if many else "seconds",
        title=f"Seconds by phase: {run.name}" if many else "Seconds by phase",
        y="seconds of a step",
        series=series,
        from_zero=True,
    )
