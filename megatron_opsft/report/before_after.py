"""Where a run began and where it is, from the lines of evals.jsonl; pure."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

QUANTITIES = ("accuracy", "mean_response_tokens")
_Line = Mapping[str, Any]


def before_and_after(evaluations: Sequence[_Line]) -> dict[str, Any]:
    """base and final: `QUANTITIES` and samples of the first and of the last evaluation, None where
    there is none; more: the same of each set of eval.more, by name.
    """
    names = [
        found[1]
        for key in (evaluations[0] if evaluations else ())
        if (found := re.fullmatch(r"eval_(\w+)_accuracy", key))
    ]
    return _ends(evaluations, "eval") | {
        "more": {name: _ends(evaluations, f"eval_{name}") for name in names}
    }


def _ends(evaluations: Sequence[_Line], prefix: str) -> dict[str, Any]:
    ends = (("base", evaluations[:1]), ("final", evaluations[-1:]))
    return {
        name: {
            key: line[0].get(f"{prefix}_{key}") if line else None
            for key in (*QUANTITIES, "samples")
        }
        for name, line in ends
    }
