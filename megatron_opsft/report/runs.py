"""A run's table whether it is finished, under way or failed."""

import json
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError
from megatron_opsft.report.curves import before_after_table, read_summary
from megatron_opsft.report.lines import read_json_lines

_QUANTITIES = ("accuracy", "mean_response_tokens")


def describe_run(run_dir: Path) -> str:
    """The before/after table; of a run without summary.json up to its last evaluation, and how far
    it is. Errors: `UserError` for a directory that holds no run.
    """
    if (run_dir / "summary.json").is_file():
        return before_after_table(read_summary(run_dir))
    summary = _so_far(run_dir)
    lines = [before_after_table(summary), "not finished: continue with --resume"]
    for failed in sorted(run_dir.glob("failed_step_*.json")):
        lines.append(f"a step failed with a loss that was not finite; its batch: {failed}")
    return "\n".join(lines)


def _so_far(run_dir: Path) -> dict[str, Any]:
    """What summary.json would say if the run ended here."""
    steps = read_json_lines(run_dir / "metrics.jsonl", required=("num_accepted", "step_seconds"))
    evaluations = read_json_lines(
        run_dir / "evals.jsonl", required=[f"eval_{name}" for name in _QUANTITIES]
    )
    if not steps and not evaluations:
        raise UserError(f"{run_dir}: no run there that has made a step or an evaluation")
    ends = (evaluations[:1], evaluations[-1:])
    base, final = (
        {name: line[0][f"eval_{name}"] if line else None for name in _QUANTITIES} for line in ends
    )
    return {
        "base": base,
        "final": final,
        "steps": steps[-1]["step"] if steps else 0,
        "seconds": sum(line["step_seconds"] for line in steps),
        "skipped_steps": sum(line["num_accepted"] == 0 for line in steps),
        "config_hash": _config_hash(run_dir / "manifest.json"),
    }


def _config_hash(manifest: Path) -> str:
    try:
        return str(json.loads(manifest.read_text(encoding="utf-8"))["config_hash"])
    except (OSError, ValueError, TypeError, KeyError):
        return "unknown"
