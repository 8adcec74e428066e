"""What the page shows of a run, but for its responses; of one that is under way or crashed too."""

import json
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError
from megatron_opsft.report.learning import describe_skipped
from megatron_opsft.report.lines import read_json_lines
from megatron_opsft.report.page.embed import encoded_size
from megatron_opsft.report.page.settings import read_settings
from megatron_opsft.runtime.step_names import in_step_order

_SIGNS = ("config.yaml", "manifest.json", "metrics.jsonl", "evals.jsonl", "rollouts")


def holds_run(path: Path) -> bool:
    """Whether a run has begun there."""
    return any((path / name).exists() for name in _SIGNS)


def run_data(run: Path, name: str, max_bytes: float) -> dict[str, Any]:
    """name: that it is shown under. max_bytes: of the curves, about; steps are left out to fit.

    Errors: `UserError` for a directory that holds no run, or damaged lines of metrics.
    """
    if not holds_run(run):
        raise UserError(f"{run}: neither a run nor an evaluation is there")
    steps = _by_step(run / "metrics.jsonl")
    evaluations = _by_step(run / "evals.jsonl")
    settings = read_settings(run / "config.yaml")
    return {
        "name": name,
        "directory": str(run),
        "state": _state(run, steps, settings),
        "facts": _facts(run, steps),
        "settings": settings,
        "num_steps": len(steps),
        "seconds": sum(line.get("step_seconds") or 0 for line in steps),
        "metrics": _columns(_thinned(steps, 0.8 * max_bytes)),
        "evals": _columns(_thinned(evaluations, 0.2 * max_bytes)),
    }


def _thinned(lines: Sequence[dict[str, Any]], max_bytes: float) -> Sequence[dict[str, Any]]:
    """The first, every so many and the last, to take at most about `max_bytes`."""
    some = lines[:: len(lines) // 100 + 1]  # enough to know what a line takes
    size = encoded_size([list(line.values()) for line in some]) * len(lines) / max(1, len(some))
    every = max(1, ceil(size / max_bytes))
    return [*lines[:-1:every], *lines[-1:]]


def _by_step(path: Path) -> list[dict[str, Any]]:
    return sorted(read_json_lines(path), key=lambda line: line["step"])


def _state(run: Path, steps: Sequence[dict[str, Any]], settings: dict[str, Any]) -> str:
    """One line on how the run ended, or how far it is."""
    reached = steps[-1]["step"] if steps else 0
    if (run / "summary.json").is_file():
        return f"finished: {reached} steps"
    failed = in_step_order(run.glob("failed_step_*.json"), "failed_step_", ".json")
    if failed and failed[-1][0] > reached:
        return f"failed: the loss of step {failed[-1][0]} was not finite"
    wanted = settings.get("run.steps", "?")
    return f"not finished: {reached} of {wanted} steps"


def _facts(run: Path, steps: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """(name, value) for the summary."""
    facts = []
    manifest = _read_object(run / "manifest.json")
    if "config_hash" in manifest:
        facts.append(("config", str(manifest["config_hash"])))
    versions = manifest.get("versions")
    if isinstance(versions, dict):
        facts.append(("versions", ", ".join(f"{name} {v}" for name, v in versions.items() if v)))
    skipped = sum(line.get("num_accepted") == 0 for line in steps)
    if learned := describe_skipped(skipped, len(steps)):
        facts.append(("note", learned))
    return facts


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _columns(lines: Sequence[dict[str, Any]]) -> dict[str, list[float | int | None]]:
    """Key -> its number in every line, None where a line has none; keys without numbers are out."""
    columns = {}
    for key in dict.fromkeys(key for line in lines for key in line):
        values = [line.get(key) for line in lines]
        numbers = [value if type(value) in (int, float) else None for value in values]
        if any(number is not None for number in numbers):
            columns[key] = numbers
    return columns
