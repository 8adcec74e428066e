"""What a run's directory says of the run, finished or not; and its table for a terminal."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_opsft.commands.report.table import Table, aligned
from megatron_opsft.config.yaml_text import parse_yaml
from megatron_opsft.errors import UserError
from megatron_opsft.run.run_files import (
    describe_skipped,
    is_skipped,
    read_json_lines,
    read_summary,
)
from megatron_opsft.runtime.formatting import count_of, percent, tokens
from megatron_opsft.runtime.owned_directory import flatten

_FILES = (
    "config.yaml",
    "metrics.jsonl",
    "evals.jsonl",
    "rollouts",
)  # one of them is a run's
Line = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """name: that it is shown under. state: one line on how it ended, or how far it is; note: on
    steps that accepted nothing. settings: by dotted key. steps, evaluations: lines by step.
    """

    name: str
    state: str
    note: str
    settings: Mapping[str, str]
    steps: Sequence[Line]
    evaluations: Sequence[Line]

    def points(self, key: str) -> list[tuple[int, float]]:
        """(step, number) of a key of metrics or, for eval_..., of evaluations, where it has one."""
        lines = self.evaluations if key.startswith("eval_") else self.steps
        found = ((line["step"], line.get(key)) for line in lines)
        return [
            (n, v) for n, v in found if isinstance(v, int | float) and math.isfinite(v)
        ]

    @property
    def more_sets(self) -> list[str]:
        """Names of the sets of eval.more."""
        keys = dict.fromkeys(key for line in self.evaluations for key in line)
        return [
            found[1]
            for key in keys
            if (found := re.fullmatch(r"eval_(\w+)_accuracy", key))
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A quantity before and after, as it is shown; is_better: of the change."""

    title: str
    before: str
    after: str
    change: str
    is_better: bool


def change_of(title: str, before: float, after: float, *, is_share: bool) -> Change:
    """Of a share, such as accuracy, which is better where it is higher; or of tokens."""
    if is_share:
        show, change = percent, f"{100 * (after - before):+.1f} points"
    else:
        show, change = tokens, f"{100 * (after / before - 1):+.1f} %" if before else "-"
    return Change(
        title=title,
        before=show(before),
        after=show(after),
        change=change,
        is_better=after >= before if is_share else after <= before,
    )


def changes_of(run: Run) -> list[Change]:
    """First and last evaluation, on each set; of steps without two, first and last step's
    rollouts.
    """
    sets = {"": "eval_"} | {f", {name}": f"eval_{name}_" for name in run.more_sets}
    if len(run.evaluations) < 2 and run.steps:
        sets = {" in training": ""}
    quantities = (
        ("Mean response tokens", "mean_response_tokens"),
        ("Accuracy", "accuracy"),
    )
    return [
        change_of(
            f"{title}{name}", points[0][1], points[-1][1], is_share=key == "accuracy"
        )
        for name, prefix in sets.items()
        for title, key in quantities
        if (points := run.points(f"{prefix}{key}"))
    ]


def read_run(run: Path, name: str) -> Run:
    """Errors: `UserError` for a directory that holds no run, or damaged lines of metrics."""
    if not any((run / file).exists() for file in _FILES):
        raise UserError(f"{run}: no run there, and no evaluation")
    steps, evaluations = (
        read_json_lines(run / name, required=required)
        for name, required in (
            ("metrics.jsonl", ("trained_tokens", "step_seconds")),
            ("evals.jsonl", ("eval_accuracy", "eval_mean_response_tokens")),
        )
    )
    settings = _settings(run / "config.yaml")
    reached = steps[-1]["step"] if steps else 0
    state = f"finished: {reached} steps"
    if not (run / "summary.json").is_file():
        state = f"not finished: {reached} of {settings.get('run.steps', '?')} steps"
    return Run(
        name=name,
        state=state,
        note=describe_skipped(sum(map(is_skipped, steps)), len(steps)),
        settings=settings,
        steps=steps,
        evaluations=evaluations,
    )


def _settings(path: Path) -> dict[str, str]:
    """config.yaml with dotted keys; empty where there is none, or it is damaged."""
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return flatten(tree, str) if isinstance(tree, dict) else {}


def table_of_changes(run: Run) -> Table:
    """Length and accuracy before and after, as `changes_of` has them."""
    several = len(run.evaluations) > 1
    sets = {name: f"eval_{name}_samples" for name in run.more_sets}
    sets = (
        {"": "eval_samples", **sets}
        if several or not run.steps
        else {"": "num_rollouts"}
    )
    told = []
    for name, key in sets.items():
        if points := run.points(key):
            count = count_of([points[0][1], points[-1][1]])
            told.append(
                f"n = {count} responses{f' of {name}' * bool(name)} at each end"
            )
    told.append(f"{len(run.steps):,} steps; metrics of a run have no intervals")
    return Table(
        caption=f"{run.name}: before and after",
        headings=["held-out problems" * several, "before", "after", "change"],
        rows=[
            [
                f"{one.title[0].lower()}{one.title[1:]}",
                one.before,
                one.after,
                one.change,
            ]
            for one in changes_of(run)
        ],
        note="; ".join(told),
    )


def describe_run(path: Path) -> str:
    """Length and accuracy before and after, up to the last evaluation, and how far the run is.

    Errors: `UserError` for a directory that holds no run, or damaged lines.
    """
    run, summary = read_run(path, path.name), read_summary(path)
    changes = table_of_changes(run)
    table = aligned(changes.headings, changes.rows)
    seconds = sum(line["step_seconds"] for line in run.steps)
    reached = run.steps[-1]["step"] if run.steps else 0
    lines = [table, f"{reached} steps in {seconds:.0f} s", run.note]
    best = summary.get("best", {"step": reached})
    if best["step"] != reached:
        told = f"{best['mean_response_tokens']:.1f} tokens, accuracy {percent(best['accuracy'])}"
        lines.append(f"best evaluation: after step {best['step']}, {told}")
    if worse := summary.get("worse_in_a_row"):
        lines.append(
            f"ended early: {worse} evaluations in a row were worse than the base model's; hf/ "
            f"holds the model of step {summary['model_step']}"
        )
    if not summary:
        lines.append(f"{run.state}; continue with --resume")
    return "\n".join(filter(None, lines))
