"""Which evaluation of a run is the best one; pure."""

from collections.abc import Mapping, Sequence
from typing import Any

Line = Mapping[str, Any]  # of evals.jsonl


def best_evaluation(lines: Sequence[Line], within: float) -> Line | None:
    """The fewest mean response tokens of those whose accuracy is at least the first's less
    `within`; of equal ones the more accurate, then the earlier. None without a line.

    lines: in the order of their steps; the first is the base model's.
    """
    if not lines:
        return None
    least = lines[0]["eval_accuracy"] - within
    allowed = [line for line in lines if line["eval_accuracy"] >= least]
    return min(
        allowed,
        key=lambda line: (
            line["eval_mean_response_tokens"],
            -line["eval_accuracy"],
            line["step"],
        ),
    )


def evaluations_since_best(lines: Sequence[Line], within: float) -> int:
    """How many came after the best one."""
    best = best_evaluation(lines, within)
    return 0 if best is None else sum(line["step"] > best["step"] for line in lines)
