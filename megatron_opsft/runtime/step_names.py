"""Names of the files and directories of a step: `step_000042`, `step_000042.jsonl.gz`."""

import re
from collections.abc import Iterable
from pathlib import Path

# Of checkpoints that are being written, and of one that is being replaced.
PARTIAL, REPLACED = ".partial_", ".partial_replaced_"


def step_name(step: int, before: str = "step_", behind: str = "") -> str:
    """The name of what belongs to a step, with at least six digits."""
    return f"{before}{step:06d}{behind}"


def step_in(name: str, before: str = "step_", behind: str = "") -> int | None:
    """The step whose `step_name` this is, exactly; None for any other name."""
    found = re.fullmatch(f"{re.escape(before)}([0-9]{{6,}}){re.escape(behind)}", name)
    if found is None:
        return None
    step = int(found[1])
    return step if step_name(step, before, behind) == name else None


def in_step_order(
    paths: Iterable[Path], before: str = "step_", behind: str = ""
) -> list[tuple[int, Path]]:
    """(step, path) of the paths that belong to a step, ascending; others are left out."""
    found = [(step_in(path.name, before, behind), path) for path in paths]
    return sorted((step, path) for step, path in found if step is not None)
