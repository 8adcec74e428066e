"""Whether a run learned anything, and when it was at its best, in one line."""

from collections.abc import Mapping
from typing import Any


def describe_skipped(skipped: int, steps: int) -> str:
    """skipped: steps that accepted no response, of so many; "" where there is none."""
    if not skipped:
        return ""
    if skipped < steps:
        return f"{skipped} of {steps} steps accepted no response and learned nothing"
    return (
        f"NOTHING WAS LEARNED: none of {steps} steps accepted a response, and hf/ holds the "
        "weights that the run began with"
    )


def describe_best(summary: Mapping[str, Any]) -> str:
    """summary: as in summary.json; "" where the last evaluation is the best, or none is named."""
    best = summary.get("best")
    if not best or best["step"] == summary["steps"]:
        return ""
    return (
        f"best evaluation: after step {best['step']}, {best['mean_response_tokens']:.1f} tokens, "
        f"accuracy {100 * best['accuracy']:.1f} %"
    )
