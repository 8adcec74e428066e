"""What the page shows of a run, but for its responses; of one that is under way or crashed too."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_opsft.config.yaml_text import parse_yaml
from megatron_opsft.errors import UserError
from megatron_opsft.report.learning import describe_skipped
from megatron_opsft.report.lines import read_json_lines
from megatron_opsft.report.page.plot import Point
from megatron_opsft.runtime.step_names import in_step_order

_SIGNS = ("config.yaml", "manifest.json", "metrics.jsonl", "evals.jsonl", "rollouts")
Line = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """name: that it is shown under. state: one line on how it ended, or how far it is. facts:
    (name, value). settings: by dotted key. steps, evaluations: lines by step.
    """

    name: str
    state: str
    facts: Sequence[tuple[str, str]]
    settings: Mapping[str, Any]
    steps: Sequence[Line]
    evaluations: Sequence[Line]

    def points(self, key: str) -> list[Point]:
        """(step, number) of a key of metrics or, for eval_..., of evaluations, where it has one."""
        lines = self.evaluations if key.startswith("eval_") else self.steps
        found = []
        for line in lines:
            value = line.get(key)
            if isinstance(value, int | float) and math.isfinite(value):
                found.append((line["step"], value))
        return found

    def last(self, key: str) -> float | None:
        """The last number of a key; None where there is none."""
        points = self.points(key)
        return points[-1][1] if points else None


def holds_run(path: Path) -> bool:
    """Whether a run has begun there."""
    return any((path / name).exists() for name in _SIGNS)


def run_data(run: Path, name: str) -> RunData:
    """Errors: `UserError` for a directory that holds no run, or damaged lines of metrics."""
    if not holds_run(run):
        raise UserError(f"{run}: neither a run nor an evaluation is there")
    steps, evaluations = (
        sorted(read_json_lines(run / f"{kind}.jsonl"), key=lambda line: line["step"])
        for kind in ("metrics", "evals")
    )
    settings = _settings(run / "config.yaml")
    return RunData(
        name=name,
        state=_state(run, steps, settings),
        facts=_facts(run, steps),
        settings=settings,
        steps=steps,
        evaluations=evaluations,
    )


def differing(runs: Sequence[RunData]) -> list[str]:
    """Settings that do not have the same value in all runs; where a run lives is none."""
    keys = {key for run in runs for key in run.settings} - {"run.dir"}
    first = runs[0].settings if runs else {}
    return sorted(k for k in keys if any(r.settings.get(k) != first.get(k) for r in runs))


def _state(run: Path, steps: Sequence[Line], settings: Mapping[str, Any]) -> str:
    reached = steps[-1]["step"] if steps else 0
    if (run / "summary.json").is_file():
        return f"finished: {reached} steps"
    failed = in_step_order(run.glob("failed_step_*.json"), "failed_step_", ".json")
    if failed and failed[-1][0] > reached:
        return f"failed: the loss of step {failed[-1][0]} was not finite"
    return f"not finished: {reached} of {settings.get('run.steps', '?')} steps"


def _facts(run: Path, steps: Sequence[Line]) -> list[tuple[str, str]]:
    facts = [("directory", str(run))]
    try:
        manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
        facts.append(("config", str(manifest["config_hash"])))
        versions = manifest["versions"].items()
        facts.append(("versions", ", ".join(f"{name} {v}" for name, v in versions if v)))
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        pass  # of a run that has only begun, or damaged
    skipped = sum(line.get("num_accepted") == 0 for line in steps)
    if learned := describe_skipped(skipped, len(steps)):
        facts.append(("note", learned))
    return facts


def _settings(path: Path) -> dict[str, Any]:
    """config.yaml with dotted keys; empty where there is none, or it is damaged."""
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return _flat(tree) if isinstance(tree, dict) else {}


def _flat(tree: Mapping[Any, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{before}{key}.")
        else:
            flat[f"{before}{key}"] = value
    return flat
