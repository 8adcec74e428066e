"""Reads what a run wrote: lines of metrics and evaluations, summary.json."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError
from megatron_opsft.runtime.durable import json_lines


def read_json_lines(
    path: Path, *, required: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """The objects of a file, in order; none where there is no file. A torn last line is left out.

    required: keys that every line has besides `step`, with numbers. Errors: `UserError` naming file
    and line for one that is not an object, or lacks one of these numbers.
    """
    records = list(json_lines(path))
    for number, record in enumerate(records, start=1):
        for key in ("step", *required):
            if type(record.get(key)) not in (int, float):
                raise UserError(
                    f"{path}:{number}: {key} is {json.dumps(record.get(key)):.40}, not a number; "
                    "restore the file, or delete that line"
                )
    return records


def is_skipped(step: Mapping[str, Any]) -> bool:
    """Whether a step trained on no token, so that it changed no weight. step: a line of
    metrics.jsonl.
    """
    return not step["trained_tokens"]


def describe_skipped(skipped: int, steps: int) -> str:
    """skipped: how many of the steps are, see `is_skipped`; "" if none is."""
    if not skipped:
        return ""
    if skipped < steps:
        return f"{skipped} of {steps} steps trained on no token and learned nothing"
    return (
        f"NOTHING WAS LEARNED: none of {steps} steps trained on a token, and hf/ holds the "
        "weights that the run began with"
    )


def best_evaluation(
    lines: Sequence[Mapping[str, Any]], within: float
) -> Mapping[str, Any] | None:
    """The evaluation with the fewest mean response tokens among those whose accuracy is at most
    `within` below the first one's; of equal ones the more accurate, then the earlier.

    lines: in the order of their steps; the first is the base model's. None without a line.
    """
    if not lines:
        return None
    least = lines[0]["eval_accuracy"] - within
    return min(
        (line for line in lines if line["eval_accuracy"] >= least),
        key=lambda line: (
            line["eval_mean_response_tokens"],
            -line["eval_accuracy"],
            line["step"],
        ),
    )


def read_summary(run: Path) -> dict[str, Any]:
    """summary.json of a finished run; empty of another. Errors: `UserError` for a damaged one."""
    path = run / "summary.json"
    if not path.is_file():
        return {}
    try:
        summary = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        summary = None
    if not isinstance(summary, dict):
        raise UserError(
            f"{path}: not the summary of a run; restore it, or delete it and finish the run again "
            "(--resume)"
        )
    return summary
