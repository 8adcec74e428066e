"""What a run did to length and accuracy: a figure over its steps and a before/after table."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError
from megatron_opsft.report.before_after import QUANTITIES
from megatron_opsft.report.canvas import check_suffixes, figure_saved_as
from megatron_opsft.report.learning import describe_best, describe_skipped
from megatron_opsft.report.lines import read_json_lines

_TOKENS_COLOR = "#2a6f97"
_ACCURACY_COLOR = "#c1541c"
_Line = Mapping[str, Any]


def read_summary(run_dir: Path) -> dict[str, Any]:
    """summary.json of a finished run; `UserError` when there is none, or it is damaged."""
    path = Path(run_dir) / "summary.json"
    if not path.is_file():
        raise UserError(f"{path}: not found; a run writes it when it ends, so finish it (--resume)")
    try:
        summary: dict[str, Any] = json.loads(path.read_bytes())
        is_whole = _is_summary(summary)
    except (ValueError, TypeError, KeyError, RecursionError):
        is_whole = False
    if not is_whole:
        raise UserError(
            f"{path}: not the summary of a run; restore it, or delete it and finish the run again "
            "(--resume)"
        )
    return summary


def _is_summary(summary: _Line) -> bool:
    """Whether what the table shows is of the right kinds. Errors: `KeyError`, `TypeError`."""
    measured = [summary[name][key] for name in ("base", "final") for key in QUANTITIES]
    counted = [summary["steps"], summary["seconds"]]
    return (
        all(type(value) in (int, float, type(None)) for value in measured)
        and all(type(value) in (int, float) for value in counted)
        and isinstance(summary["config_hash"], str)
    )


def before_after_table(summary: _Line) -> str:
    """A plain-text table of accuracy and mean response tokens before and after training.

    summary: as in summary.json; a run without held-out problems has no numbers to compare and gets
    dashes.
    """
    from tabulate import tabulate

    sets = {"": summary, **{f"{name}: ": ends for name, ends in summary.get("more", {}).items()}}
    lines = [line for name, ends in sets.items() for line in _lines(name, ends)]
    table = tabulate(
        lines,
        ("held-out problems", "before", "after", "change"),
        disable_numparse=True,
        colalign=("left", "right", "right", "right"),
    )
    footer = (
        f"{summary['steps']} steps in {summary['seconds']:.0f} s, config {summary['config_hash']}"
    )
    learned = describe_skipped(summary.get("skipped_steps", 0), summary["steps"])
    return "\n".join(filter(None, [table, footer, describe_best(summary), learned]))


def _lines(name: str, ends: _Line) -> list[list[str]]:
    headings = [f"{name}mean response tokens", f"{name}accuracy"]
    (accuracy, accuracy_now), (tokens, tokens_now) = (
        [ends[end][key] for end in ("base", "final")] for key in QUANTITIES
    )
    if None in (accuracy, accuracy_now, tokens, tokens_now):
        return [[heading, "-", "-", "-"] for heading in headings]
    shorter = f"{100 * (tokens_now / tokens - 1):+.1f} %" if tokens else "-"
    points = f"{100 * (accuracy_now - accuracy):+.1f} points"
    return [
        [headings[0], f"{tokens:.1f}", f"{tokens_now:.1f}", shorter],
        [headings[1], f"{100 * accuracy:.1f} %", f"{100 * accuracy_now:.1f} %", points],
    ]


def plot_run(run_dir: Path, out_path: Path) -> None:
    """Draw mean response tokens and accuracy over steps into a .png, .svg or .pdf file.

    Lines are the training rollouts (metrics.jsonl), markers the evaluations on held-out problems
    (evals.jsonl, or the eval_* keys of metrics.jsonl). `UserError` for a directory without metrics
    or another suffix. The same run gives the same bytes.
    """
    run_dir, out_path = Path(run_dir), Path(out_path)
    check_suffixes([out_path])
    steps = _read_steps(run_dir / "metrics.jsonl")
    evaluations = [line for line in steps if "eval_accuracy" in line]
    evaluations = _read_steps(run_dir / "evals.jsonl") or evaluations
    if not steps and not evaluations:
        raise UserError(f"{run_dir}: no metrics.jsonl of a run there, or it holds no step yet")

    with figure_saved_as([out_path], (7.2, 5.2)) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        _draw(upper, steps, evaluations, "mean_response_tokens", _TOKENS_COLOR, scale=1)
        _draw(lower, steps, evaluations, "accuracy", _ACCURACY_COLOR, scale=100)
        upper.set_ylabel("mean response tokens")
        upper.set_ylim(bottom=0)
        lower.set_ylabel("accuracy (%)")
        low, high = lower.get_ylim()
        high = min(100.5, high + 1)
        lower.set_ylim(min(low, high - 10), high)  # so that noise of a point looks like noise
        lower.set_xlabel("training step")
        upper.legend(frameon=False, loc="upper right")


def _draw(
    axes: Any,
    steps: Sequence[_Line],
    evaluations: Sequence[_Line],
    key: str,
    color: str,
    *,
    scale: float,
) -> None:
    """One quantity: a line over the training steps, markers at the evaluations."""
    trained = [line for line in steps if line.get(key) is not None]
    evaluations = [line for line in evaluations if line.get(f"eval_{key}") is not None]
    axes.plot(
        [line["step"] for line in trained],
        [scale * line[key] for line in trained],
        color=color,
        linewidth=1.4,
        alpha=0.75,
        label="training rollouts",
    )
    axes.plot(
        [line["step"] for line in evaluations],
        [scale * line[f"eval_{key}"] for line in evaluations],
        color=color,
        linestyle=":",
        linewidth=1.0,
        marker="o",
        markersize=7,
        markeredgecolor="white",
        clip_on=False,
        zorder=3,
        label="held-out problems",
    )
    for place in (0, -1) if len(evaluations) > 1 else ():
        line = evaluations[place]
        value = scale * line[f"eval_{key}"]
        axes.annotate(
            f"{value:.1f}",
            (line["step"], value),
            textcoords="offset points",
            # Away from the rollouts: they are cut off, so they end longer and less often right.
            xytext=(8, 7) if place == 0 else (0, 7 if key == "accuracy" else -16),
            ha="left" if place == 0 else "right",
            color=color,
            fontweight="bold",
        )
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02)


def _read_steps(path: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl or evals.jsonl by step; errors as of `read_json_lines`."""
    numbers = [prefix + name for name in QUANTITIES for prefix in ("", "eval_")]
    return sorted(read_json_lines(path, numbers=numbers), key=lambda line: line["step"])
