"""Metrics and evaluations of a run, finished or not, read from its directory; and their table for
a terminal.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from megatron_opsft.commands.report.table import Table, aligned
from megatron_opsft.config.yaml_text import parse_yaml
from megatron_opsft.errors import UserError
from megatron_opsft.records import JsonObject, record
from megatron_opsft.run.run_files import (
    describe_best,
    describe_decline,
    describe_rejected,
    describe_skipped,
    is_skipped,
    read_json_lines,
    read_summary,
)
from megatron_opsft.runtime.formatting import count_of, percent, tokens
from megatron_opsft.runtime.intervals import (
    describe_evidence,
    interval_of_points,
    share_interval,
    signed_interval,
)
from megatron_opsft.runtime.owned_directory import flatten

# A directory with any of these is a run's.
_FILES = ("config.yaml", "metrics.jsonl", "evals.jsonl", "rollouts")
# Quantity -> how its keys in metrics.jsonl and evals.jsonl end.
_QUANTITIES = {"Mean response tokens": "mean_response_tokens", "Accuracy": "accuracy"}
Line = JsonObject


@record
class Run:
    """A run as its directory describes it."""

    name: str
    """Shown in tables and charts."""
    state: str
    """One line that says whether it is finished, and after how many steps."""
    note: str
    """Warnings: of steps that trained on no token, of a model that got worse; "" without any."""
    settings: Mapping[str, str]
    """Dotted key -> value of config.yaml."""
    last_step: int
    """0 before the first one."""
    steps: Sequence[Line]
    """Lines of metrics.jsonl, one for each step."""
    evaluations: Sequence[Line]
    """Lines of evals.jsonl, by step."""
    held_out: Mapping[str, str]
    """Held-out set -> hash of its problems; "eval" is the first set. Empty if it is not known."""

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
    def compared(self) -> dict[str, str]:
        """The sets whose accuracy and length are compared: what a title says of the set -> how its
        keys begin, such as {"": "eval_", ", aime": "eval_aime_"}.

        If there are steps but fewer than two evaluations, it is the rollouts of training alone.
        """
        if self.steps and len(self.evaluations) < 2:
            return {" in training": ""}
        names = {f", {name}": f"eval_{name}_" for name in self.more_sets}
        return {"": "eval_", **names}

    @property
    def more_sets(self) -> list[str]:
        """Names of the evaluated sets of `eval.more`."""
        names = []
        for key in dict.fromkeys(chain.from_iterable(self.evaluations)):
            if match := re.fullmatch(r"eval_(\w+)_accuracy", key):
                names.append(match[1])
        return names

    @property
    def outcomes(self) -> list[str]:
        """A sentence for each evaluated set: how many responses were rejected for which reason, in
        the first and in the last evaluation; none where the lines do not say.
        """
        if not self.evaluations:
            return []
        ends = [self.evaluations[0]]
        if len(self.evaluations) > 1:
            ends.append(self.evaluations[-1])
        sentences = []
        for name in ("", *self.more_sets):
            prefix = f"eval_{name}_" if name else "eval_"
            counted = []
            for line in ends:
                if f"{prefix}num_wrong" in line:
                    rejected = describe_rejected(line, prefix) or "all correct"
                    count = count_of([line[f"{prefix}samples"]], "response")
                    counted.append(f"{rejected}, of {count} after step {line['step']}")
            if counted:
                title = f"held-out, {name}" if name else "held-out"
                sentences.append(f"{title}: {'; '.join(counted)}")
        return sentences


class Change(NamedTuple):
    """A quantity before and after, formatted."""

    title: str
    before: str
    after: str
    """"" for a quantity that was measured once; so is `change`."""
    change: str
    """The difference, with its sign and unit."""
    is_better: bool
    """Whether the quantity became better, or stayed the same."""
    n: str = ""
    """How many observations it rests on; "" if that is not known."""
    interval: str = ""
    """The 95 % interval of the difference, with its unit; "" if that is not known."""
    holds_zero: bool = False
    """Whether the interval holds 0: then the difference may be chance."""

    @property
    def evidence(self) -> str:
        """One line: n, interval, and whether the difference may be chance."""
        return describe_evidence(self.n, self.interval, holds_zero=self.holds_zero)

    @property
    def judgement(self) -> str:
        """The class of its style: "better" or "worse", or "unclear" if it may be chance."""
        if self.holds_zero:
            return "unclear"
        return "better" if self.is_better else "worse"


def change_of(
    title: str,
    before: float,
    after: float,
    *,
    is_share: bool,
    n: str = "",
    interval: tuple[float, float] | None = None,
) -> Change:
    """Compare two values of a share, such as accuracy, of which more is better; or of a number of
    tokens, of which fewer is better.

    n: as of `Change`. interval: both ends of the 95 % interval of after - before.
    """
    if is_share:
        show, scale, unit = percent, 100.0, "points"
        change = f"{100 * (after - before):+.1f} points"
        is_better = after >= before
    else:
        show, scale, unit = tokens, 100 / before if before else 0.0, "%"
        change = f"{100 * (after / before - 1):+.1f} %" if before else "-"
        is_better = after <= before
    shown_interval, holds_zero = "", False
    if interval is not None and scale:
        low, high = interval
        shown_interval = signed_interval(scale * low, scale * high, unit)
        if is_share:
            shown_interval = interval_of_points(before, low, high)
        holds_zero = low <= 0 <= high
    return Change(
        title=title,
        before=show(before),
        after=show(after),
        change=change,
        is_better=is_better,
        n=n,
        interval=shown_interval,
        holds_zero=holds_zero,
    )


def changes_of(run: Run) -> list[Change]:
    """Compare the first and the last length and accuracy of each set in `Run.compared`.

    Of accuracies there is an interval if the numbers of responses are known; the spread of lengths
    is not.
    """
    changes = []
    for of_set, prefix in run.compared.items():
        counts = dict(run.points(_samples_key(prefix)))
        for quantity, key in _QUANTITIES.items():
            points = run.points(prefix + key)
            if not points:
                continue
            (first, before), (last, after) = points[0], points[-1]
            is_share = key == "accuracy"
            n, interval = "", None
            if counts.get(first) and counts.get(last):
                num_before, num_after = int(counts[first]), int(counts[last])
                n = f"{count_of([num_before, num_after], 'response')} at each end"
                if is_share and first != last:
                    interval = share_interval(before, num_before, after, num_after)
            change = change_of(
                quantity + of_set,
                before,
                after,
                is_share=is_share,
                n=n,
                interval=interval,
            )
            if len(points) == 1:
                change = change._replace(after="", change="", n="")
            changes.append(change)
    return changes


def _samples_key(prefix: str) -> str:
    """Return the key of the number of responses behind values whose keys begin with `prefix`."""
    return f"{prefix}samples" if prefix else "num_rollouts"


def warn_of_held_out(runs: Sequence[Run]) -> str:
    """Say which of the runs were evaluated on different held-out problems; "" if none were."""
    warnings = []
    for name in dict.fromkeys(chain.from_iterable(run.held_out for run in runs)):
        runs_of: dict[str, list[str]] = {}  # hash of the problems -> runs
        for run in runs:
            if name in run.held_out:
                runs_of.setdefault(run.held_out[name], []).append(run.name)
        if len(runs_of) > 1:
            of_set = "" if name == "eval" else f" of {name}"
            groups = " | ".join(", ".join(names) for names in runs_of.values())
            warnings.append(f"different held-out problems{of_set}: {groups}")
    if not warnings:
        return ""
    return f"Do not compare these runs' accuracies and lengths: {'; '.join(warnings)}."


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
    state = f"finished: {count_of([last_step], 'step')}"
    if not (run / "summary.json").is_file():
        state = f"not finished: {last_step} of {settings.get('run.steps', '?')} steps"
    skipped = describe_skipped(sum(map(is_skipped, steps)), len(steps))
    decline = describe_decline(evaluations[0], evaluations[-1]) if evaluations else ""
    return Run(
        name=name,
        state=state,
        note="; ".join(filter(None, [skipped, decline])),
        settings=settings,
        last_step=last_step,
        steps=steps,
        evaluations=evaluations,
        held_out=_read_held_out(run / "manifest.json"),
    )


def _read_held_out(path: Path) -> dict[str, str]:
    """Return held-out set -> hash of its problems; nothing if the manifest does not say."""
    try:
        hashes = json.loads(path.read_bytes())["identity"]["held_out_sha256"]
        return {name: str(hashes[name]) for name in hashes}
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return {}


def _read_settings(path: Path) -> dict[str, str]:
    """Return dotted key -> value of config.yaml; nothing if it is missing or damaged."""
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return flatten(tree, str) if isinstance(tree, dict) else {}


def table_of_changes(run: Run) -> Table:
    """Return a table of length and accuracy before and after; see `changes_of`."""
    notes = []
    for prefix in run.compared.values():
        if counts := [count for _, count in run.points(_samples_key(prefix))]:
            note = f"n = {count_of([counts[0], counts[-1]], 'response')}"
            # "eval_aime_" -> "aime"; "eval_" and "" have no name.
            if name := prefix.removeprefix("eval_").removesuffix("_"):
                note += f" of {name}"
            notes.append(f"{note} at each end" if len(counts) > 1 else note)
    num_steps = count_of([len(run.steps)], "step")
    notes.append(f"{num_steps}; lengths of a run have no intervals")
    heading = "" if " in training" in run.compared else "held-out problems"
    rows = []
    for change in changes_of(run):
        title = f"{change.title[0].lower()}{change.title[1:]}"
        rows.append([title, change.before, change.after, change.change])
        if change.interval:
            notes.append(f"{title}: {change.evidence}")
    return Table(
        caption=f"{run.name}: before and after",
        headings=[heading, "before", "after", "change"],
        rows=rows,
        note="; ".join(notes),
    )


def describe_run(path: Path) -> str:
    """Return the text for a terminal: the changes up to the last evaluation, what was rejected at
    both ends, the best evaluation, and how far the run is.

    Errors: `UserError` for a directory that is not a run's, or damaged lines.
    """
    run = read_run(path, path.name)
    summary = read_summary(path)
    changes = table_of_changes(run)
    seconds = sum(line["step_seconds"] for line in run.steps)
    lines = [aligned(changes.headings, changes.rows), *run.outcomes]
    for change in changes_of(run):
        if change.evidence:
            lines.append(f"{change.title}: {change.change}; {change.evidence}")
    lines += [f"{count_of([run.last_step], 'step')} in {seconds:.0f} s", run.note]
    best = summary.get("best")
    if best and best["step"] != run.last_step:
        lines.append(describe_best(best, path))
    if worse := summary.get("worse_in_a_row"):
        lines.append(
            f"ended early, with {count_of([worse], 'evaluation')} in a row worse than the base "
            f"model's; hf/ holds the model of step {summary['model_step']}"
        )
    if not summary:
        lines.append(f"{run.state}; continue with --resume")
    return "\n".join(filter(None, lines))
