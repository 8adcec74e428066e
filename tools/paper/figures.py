"""Figures of docs/paper.md."""

from collections.abc import Sequence
from pathlib import Path

from megatron_opsft.report.canvas import figure_saved_as
from megatron_opsft.report.estimate import Estimate
from megatron_opsft.report.evaluation import ScatterPoint, plot_accuracy_length
from megatron_opsft.study.table import PHASES
from paper.rows import Line, Rows

_LENGTHS = {
    "temperature": "temperature T",
    "against_grpo": "responses G",
    "length_limit": "length limit L",
    "aggregation": "divided by",
    "off_policy": "on- and off-policy",
    "derivation": "from GRPO to on-policy SFT",
}
_BUDGETED = {"accuracy": "accuracy (%)", "norm_std": "NormStd of lengths"}


def draw_all(rows: Rows, directory: Path) -> list[Path]:
    """paper_*.png of what is finished; their paths."""
    paths = [
        directory / f"paper_{name}.png"
        for name in ("accuracy_length", "lengths", "costs", "length_control")
    ]
    points = [_point(line) for line in rows.lines("methods")]
    plot_accuracy_length(points, paths[:1])
    _draw_lengths(rows, paths[1])
    _draw_costs([line for line in rows.lines("against_grpo")], paths[2])
    _draw_length_control(rows.lines("length_control"), paths[3])
    return paths


def _point(line: Line) -> ScatterPoint:
    """Of the first seed, whose intervals these are."""
    row = line.first

    def estimate(key: str) -> Estimate:
        low, high = row[f"{key}_interval"]
        return Estimate(value=row[key], low=low, high=high)

    return ScatterPoint(label=line.name, tokens=estimate("tokens"), accuracy=estimate("accuracy"))


def _draw_lengths(rows: Rows, path: Path) -> None:
    """Mean response tokens of held-out problems over the steps, first seeds."""
    with figure_saved_as([path], (10.5, 6.2), font_size=9) as figure:
        for axes, (section, title) in zip(
            figure.subplots(2, 3).flat, _LENGTHS.items(), strict=True
        ):
            for place, line in enumerate(rows.lines(section)):
                style = ("-", "--", ":", "-.")[place % 4]
                lengths = line.first["training"]["lengths"]
                axes.plot(*zip(*lengths, strict=True), style, label=line.name, linewidth=1.4)
            axes.set_title(title, fontsize=9)
            axes.set_ylim(bottom=0)
            axes.set_xlabel("step")
            axes.set_ylabel("mean response tokens")
            axes.legend(frameon=False, fontsize=7)


def _draw_costs(lines: Sequence[Line], path: Path) -> None:
    """Seconds a step by part, and trained tokens a step."""
    names = [line.name for line in lines]
    with figure_saved_as([path], (9.6, 3.6), font_size=9) as figure:
        seconds, tokens = figure.subplots(1, 2, sharey=True)
        left = [0.0] * len(lines)
        for phase in PHASES:
            widths = [line.first["training"]["phases"].get(phase, 0.0) for line in lines]
            if any(widths):
                seconds.barh(names, widths, left=left, label=phase.replace("_", " "))
                left = [a + b for a, b in zip(left, widths, strict=True)]
        trained = [
            line.mean("training", "tokens") / line.mean("training", "steps") for line in lines
        ]
        tokens.barh(names, trained, color="#888888")
        seconds.invert_yaxis()
        seconds.set_xlabel("median seconds of a step")
        tokens.set_xlabel("trained tokens a step")
        tokens.locator_params(axis="x", nbins=5)
        figure.legend(loc="outside lower center", ncols=len(PHASES), frameon=False)


def _draw_length_control(lines: Sequence[Line], path: Path) -> None:
    """Accuracy and NormStd against the token budget, first seeds."""
    with figure_saved_as([path], (8.4, 3.6), font_size=9) as figure:
        for axes, (key, heading) in zip(figure.subplots(1, 2), _BUDGETED.items(), strict=True):
            scale = 100 if key == "accuracy" else 1
            for line in lines:
                points = line.first["budgets"]
                values = [scale * point[key] for point in points]
                axes.plot([p["budget"] for p in points], values, marker=".", label=line.name)
            axes.set_xscale("log", base=2)
            axes.set_xticks([16, 32, 64, 128, 256], ["16", "32", "64", "128", "256"])
            axes.set_xlabel("token budget")
            axes.set_ylabel(heading)
            axes.set_ylim(bottom=0)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
