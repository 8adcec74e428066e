"""Metrics and evaluations of a run, finished or not, read from its directory; and their table for
a terminal.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
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

_FILES = ("config.yaml", "metrics.jsonl", "evals.jsonl", "rollouts")
"""A directory with any of these is a run's."""
_QUANTITIES = {"Mean response tokens": "mean_response_tokens", "Accuracy": "accuracy"}
"""Title -> the end of its keys in metrics.jsonl and evals.jsonl."""
Line = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as its directory describes it."""

    name: str
    """Shown in tables and charts."""
    state: str
    """One line that says whether it is finished, and after how many steps."""
    note: str
    """A warning about steps that trained on no token; "" without such steps."""
    settings: Mapping[str, str]
    """Dotted key -> value of config.yaml."""
    steps: Sequence[Line]
    """Lines of metrics.jsonl, one for each step."""
    evaluations: Sequence[Line]
    """Lines of evals.jsonl, by step."""

    def points(self, key: str) -> list[tuple[int, float]]:
        """Return (step, value) of every line in which the key has a finite number. Keys that begin
        with eval_ are of evaluations, others of metrics.
        """
        points = []
        for line in self.evaluations if key.startswith("eval_") else self.steps:
            value = line.get(key)
            if isinstance(value, int | float) and math.isfinite(value):
                points.append((line["step"], value))
        return points

    @property
    def more_sets(self) -> list[str]:
        """Names of the evaluated sets of `eval.more`."""
        names = []
        for key in dict.fromkeys(chain.from_iterable(self.evaluations)):
            if match := re.fullmatch(r"eval_(\w+)_accuracy", key):
                names.append(match[1])
        return names


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A quantity before and after, formatted."""

    title: str
    before: str
    after: str
    change: str
    """The difference, with its sign and unit."""
    is_better: bool
    """Whether the quantity became better, or stayed the same."""


def change_of(title: str, before: float, after: float, *, is_share: bool) -> Change:
    """Compare two values of a share, such as accuracy, of which more is better; or of a number of
    tokens, of which fewer is better.
    """
    if is_share:
        return Change(
            title=title,
            before=percent(before),
            after=percent(after),
            change=f"{100 * (after - before):+.1f} points",
            is_better=after >= before,
        )
    return Change(
        title=title,
        before=tokens(before),
        after=tokens(after),
        change=f"{100 * (after / before - 1):+.1f} %" if before else "-",
        is_better=after <= before,
    )


def changes_of(run: Run) -> list[Change]:
    """Compare length and accuracy of the first and the last evaluation, on each set.

    If there are steps but fewer than two evaluations, compare the rollouts of the first and the
    last step.
    """
    prefixes = {"": "eval_"}
    for name in run.more_sets:
        prefixes[f", {name}"] = f"eval_{name}_"
    if run.steps and len(run.evaluations) < 2:
        prefixes = {" in training": ""}
    changes = []
    for name, prefix in prefixes.items():
        for title, key in _QUANTITIES.items():
            if points := run.points(prefix + key):
                before, after = points[0][1], points[-1][1]
                is_share = key == "accuracy"
                changes.append(
                    change_of(title + name, before, after, is_share=is_share)
                )
    return changes


def read_run(run: Path, name: str) -> Run:
    """Read a run's directory.

    Errors: `UserError` for a directory that is not a run's, or damaged lines of metrics.
    """
    if not any((run / file).exists() for file in _FILES):
        raise UserError(f"{run}: no run there, and no evaluation")
    steps = read_json_lines(
        run / "metrics.jsonl", required=("trained_tokens", "step_seconds")
    )
    evaluations = read_json_lines(
        run / "evals.jsonl", required=("eval_accuracy", "eval_mean_response_tokens")
    )
    settings = _read_settings(run / "config.yaml")
    last_step = steps[-1]["step"] if steps else 0
    state = f"finished: {last_step} steps"
    if not (run / "summary.json").is_file():
        state = f"not finished: {last_step} of {settings.get('run.steps', '?')} steps"
    return Run(
        name=name,
        state=state,
        note=describe_skipped(sum(map(is_skipped, steps)), len(steps)),
        settings=settings,
        steps=steps,
        evaluations=evaluations,
    )


def _read_settings(path: Path) -> dict[str, str]:
    """Return dotted key -> value of config.yaml; nothing if it is missing or damaged."""
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return flatten(tree, str) if isinstance(tree, dict) else {}


def table_of_changes(run: Run) -> Table:
    """Return a table of length and accuracy before and after; see `changes_of`."""
    has_evaluations = len(run.evaluations) > 1
    count_keys = {"": "eval_samples"}
    if run.steps and not has_evaluations:
        count_keys = {"": "num_rollouts"}
    else:
        count_keys |= {name: f"eval_{name}_samples" for name in run.more_sets}
    notes = []
    for name, key in count_keys.items():
        if points := run.points(key):
            count = count_of([points[0][1], points[-1][1]])
            which_set = f" of {name}" if name else ""
            notes.append(f"n = {count} responses{which_set} at each end")
    notes.append(f"{len(run.steps):,} steps; metrics of a run have no intervals")
    rows = []
    for change in changes_of(run):
        title = f"{change.title[0].lower()}{change.title[1:]}"
        rows.append([title, change.before, change.after, change.change])
    first_heading = "held-out problems" if has_evaluations else ""
    return Table(
        caption=f"{run.name}: before and after",
        headings=[first_heading, "before", "after", "change"],
        rows=rows,
        note="; ".join(notes),
    )


def describe_run(path: Path) -> str:
    """Return the text for a terminal: the changes up to the last evaluation, the best evaluation,
    and how far the run is.

    Errors: `UserError` for a directory that is not a run's, or damaged lines.
    """
    run, summary = read_run(path, path.name), read_summary(path)
    changes = table_of_changes(run)
    seconds = sum(line["step_seconds"] for line in run.steps)
    last_step = run.steps[-1]["step"] if run.steps else 0
    lines = [aligned(changes.headings, changes.rows)]
    lines += [f"{last_step} steps in {seconds:.0f} s", run.note]
    best = summary.get("best", {"step": last_step})
    if best["step"] != last_step:
        lines.append(
            f"best evaluation: after step {best['step']}, "
            f"{best['mean_response_tokens']:.1f} tokens, "
            f"accuracy {percent(best['accuracy'])}"
        )
    if worse := summary.get("worse_in_a_row"):
        lines.append(
            f"ended early: {worse} evaluations in a row were worse than the base model's; hf/ "
            f"holds the model of step {summary['model_step']}"
        )
    if not summary:
        lines.append(f"{run.state}; continue with --resume")
    return "\n".join(filter(None, lines))
