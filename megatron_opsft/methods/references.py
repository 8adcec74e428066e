"""Lengths and accuracy of the reference model's responses to each problem, from a file."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron_opsft.errors import UserError
from megatron_opsft.methods.facts import ReferenceStatistics


def read_references(path: Path) -> dict[str, ReferenceStatistics]:
    """By problem id, from lines `{"problem_id": ..., "mean_tokens": ..., "accuracy": ...}`.

    Errors: `UserError` that names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"method.references={path} cannot be read: {error}") from None
    found = {}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            mean_tokens, accuracy = float(row["mean_tokens"]), float(row["accuracy"])
            is_possible = mean_tokens > 0 and 0 <= accuracy <= 1
        except (ValueError, KeyError, TypeError):
            is_possible = False
        if not is_possible:
            raise UserError(
                f"method.references={path}, line {number}: write an object with problem_id, "
                "mean_tokens above 0 and accuracy between 0 and 1"
            )
        found[str(row.get("problem_id"))] = ReferenceStatistics(
            mean_tokens=mean_tokens, accuracy=accuracy
        )
    return found


def check_references(found: Mapping[str, object], problem_ids: Iterable[str], path: Path) -> None:
    """Errors: `UserError` where a problem of the run has none."""
    missing = [problem_id for problem_id in problem_ids if problem_id not in found]
    if missing:
        raise UserError(
            f"method.references={path} has no line for {len(missing)} problems, the first "
            f"{missing[0]}; add them, or train on the others"
        )


def check_monitor(monitor: Iterable[str], held_out: Iterable[str]) -> None:
    """Errors: `UserError` where a monitor problem is an evaluation problem too; by their texts."""
    shared = set(monitor) & set(held_out)
    if shared:
        raise UserError(
            f"{len(shared)} monitor problems of the method are evaluation problems too, such as "
            f"{min(shared)[:60]!r}: targets would be chosen on them; train on other data, or set "
            "eval.data"
        )
