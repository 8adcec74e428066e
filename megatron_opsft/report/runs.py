"""A run's table whether it is finished, under way or failed."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError
from megatron_opsft.report.before_after import QUANTITIES, before_and_after
from megatron_opsft.report.curves import before_after_table, read_summary
from megatron_opsft.report.lines import read_json_lines


def report_runs(
    run_dirs: Sequence[Path], figure: Path | None, say: Callable[[str], object]
) -> dict[Path, UserError]:
    """`report_run` of each; those that cannot be read are said and given back. Errors: `UserError`
    of the only one.
    """
    unread = {}
    for run_dir in run_dirs:
        try:
            text = report_run(run_dir, figure)
        except UserError as error:
            if len(run_dirs) == 1:
                raise
            unread[run_dir] = error
            text = f"not read: {error}"
        say(f"{run_dir}:\n{text}" if len(run_dirs) > 1 else text)
    return unread


def report_run(run_dir: Path, figure: Path | None = None) -> str:
    """`describe_run`, and where the curves were drawn; none of a run that has made no step yet.

    figure: by default curves.png in the run's directory. Errors: `UserError`.
    """
    text = describe_run(run_dir)
    files = [run_dir / name for name in ("metrics.jsonl", "evals.jsonl")]
    if not any(file.is_file() and file.stat().st_size for file in files):
        return text
    from megatron_opsft.report.curves import plot_run

    out = figure or run_dir / "curves.png"
    plot_run(run_dir, out)
    return f"{text}\nfigure: {out}"


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
        run_dir / "evals.jsonl", required=[f"eval_{name}" for name in QUANTITIES]
    )
    if not steps and not evaluations and not (run_dir / "manifest.json").is_file():
        raise UserError(f"{run_dir}: no run there")
    return {
        **before_and_after(evaluations),
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
