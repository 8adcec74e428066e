"""Reads the files of a run: metrics.jsonl, evals.jsonl, summary.json."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError
from megatron_opsft.records import JsonObject
from megatron_opsft.runtime.durable import json_lines

# A line of metrics.jsonl or evals.jsonl: its values by key.
Line = Mapping[str, float | int]


def read_json_lines(path: Path, *, required: Sequence[str] = ()) -> list[JsonObject]:
    """Return the objects of a JSON-lines file, in order; an empty list if there is no such file.

    A last line that was not written to its end is left out. required: keys that must hold a number
    in every line; `step` always must. Errors: `UserError`, naming file and line, for a line that is
    not an object or lacks one of these numbers.
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
    """True if a step trained on no token, so that it changed no weight.

    step: its line of metrics.jsonl.
    """
    return not step["trained_tokens"]


def describe_skipped(skipped: int, steps: int) -> str:
    """Say how many steps learned nothing; "" if all of them learned.

    skipped: the number of steps for which `is_skipped` is true.
    """
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
) -> Mapping[str, Any]:
    """Return the evaluation with the shortest responses among those that are accurate enough.

    Shortest: the fewest mean response tokens; of equal ones the more accurate, then the earlier.
    Accurate enough: at most `within` below the accuracy of the first evaluation.
    lines: the lines of evals.jsonl, in the order of their steps; the first is the base model's.
    Returns {} if there is no line.
    """
    if not lines:
        return {}
    lowest_accuracy = lines[0]["eval_accuracy"] - within
    return min(
        (line for line in lines if line["eval_accuracy"] >= lowest_accuracy),
        key=lambda line: (
            line["eval_mean_response_tokens"],
            -line["eval_accuracy"],
            line["step"],
        ),
    )


def read_summary(run: Path) -> JsonObject:
    """Return the summary.json of a run; {} if the run has not finished.

    Errors: `UserError` for a damaged file.
    """
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
