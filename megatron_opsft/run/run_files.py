"""Reads the files of a run: metrics.jsonl, evals.jsonl, summary.json."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_opsft.config import EvalConfig
from megatron_opsft.errors import UserError
from megatron_opsft.records import JsonObject
from megatron_opsft.runtime.durable import json_lines
from megatron_opsft.runtime.formatting import count_of, percent
from megatron_opsft.runtime.intervals import share_margin

# A line of metrics.jsonl or evals.jsonl: its values by key.
Line = Mapping[str, float | int]
# Reasons why responses are rejected: their keys in metrics.jsonl, and their names for people. In
# evals.jsonl a set's prefix comes before the key, such as eval_num_wrong.
REASONS = {
    "num_unfinished": "cut off",
    "num_wrong": "wrong",
    "num_no_answer": "no answer",
    "verify_timeouts": "timed out",
    "verify_errors": "judge failed",
}


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
        f"NOTHING WAS LEARNED: none of {count_of([steps], 'step')} trained on a token, and hf/ "
        "holds the weights that the run began with"
    )


def is_worse(
    first: Mapping[str, Any], later: Mapping[str, Any], prefix: str = "eval_"
) -> bool:
    """True if the accuracy of a later evaluation is below the first one's by more than chance.

    Chance: half the width of the 95 % interval of their difference, see `share_margin`. first,
    later: lines of evals.jsonl; or, with the prefix "", of summary.json. False if one of them does
    not count its samples, as of early versions, or if nothing was evaluated.
    """
    num_before, num_after = (line.get(f"{prefix}samples") for line in (first, later))
    if not num_before or not num_after:
        return False
    before, after = first[f"{prefix}accuracy"], later[f"{prefix}accuracy"]
    return bool(before - after > share_margin(before, num_before, after, num_after))


def describe_decline(
    first: Mapping[str, Any], last: Mapping[str, Any], prefix: str = "eval_"
) -> str:
    """Say in words that the last evaluation is worse than the first; "" if it is not.

    Arguments: see `is_worse`.
    """
    if not is_worse(first, last, prefix):
        return ""
    before, after = (line[f"{prefix}accuracy"] for line in (first, last))
    return (
        f"THE MODEL GOT WORSE: held-out accuracy fell from {percent(before)} to {percent(after)}, "
        "more than chance"
    )


def describe_rejected(counts: Mapping[str, Any], prefix: str = "") -> str:
    """Count the rejected responses by reason, for example `28 cut off, 3 wrong, 1 no answer`.

    counts: a line of metrics.jsonl or evals.jsonl. prefix: what its keys begin with, such as eval_.
    Returns "" if nothing was rejected, or if the line does not say.
    """
    named = []
    for key, name in REASONS.items():
        if count := counts.get(f"{prefix}{key}"):
            named.append(f"{count} {name}")
    return ", ".join(named)


def best_evaluation(
    lines: Sequence[Mapping[str, Any]], settings: EvalConfig
) -> Mapping[str, Any]:
    """Return the best evaluation by the rule `eval.best`.

    shortest: the fewest mean response tokens, of equal ones the more accurate, then the earlier; of
    those at most `eval.best_within` below the accuracy of the first evaluation. accuracy: the most
    accurate, of equal ones the shorter, then the earlier. By both rules a new evaluation can only
    replace the best one: an earlier one never becomes the best again, and its model may go.

    lines: the lines of evals.jsonl, in the order of their steps; the first is the base model's.
    Returns {} if there is no line.
    """
    if not lines:
        return {}
    if settings.best == "accuracy":
        return min(
            lines,
            key=lambda line: (
                -line["eval_accuracy"],
                line["eval_mean_response_tokens"],
                line["step"],
            ),
        )
    lowest_accuracy = lines[0]["eval_accuracy"] - settings.best_within
    return min(
        (line for line in lines if line["eval_accuracy"] >= lowest_accuracy),
        key=lambda line: (
            line["eval_mean_response_tokens"],
            -line["eval_accuracy"],
            line["step"],
        ),
    )


def describe_best(best: Mapping[str, Any], run: Path) -> str:
    """Say which evaluation is the best, by which rule, and where its model lies.

    best: `best` of the summary.json of the run in the directory `run`; earlier versions wrote no
    rule and no model.
    """
    moment = f"after step {best['step']}" if best["step"] else "the base model's"
    text = (
        f"best evaluation: {moment}, {best['mean_response_tokens']:.1f} tokens, "
        f"accuracy {percent(best['accuracy'])}"
    )
    if "rule" in best:
        text += f" ({best['rule']})"
    if best.get("model"):
        text += f"; its model is in {run / best['model']}"
    elif "rule" in best and best["step"]:
        text += "; its model was not kept: see eval.export_best"
    return text


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
