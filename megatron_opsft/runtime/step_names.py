"""Names of the files and directories of a step: `step_000042`, `step_000042.jsonl.gz`."""

import re
from collections.abc import Iterable
from pathlib import Path

COMPLETE = "complete.json"  # of a checkpoint: step, and every file with its size
# Of checkpoints that are being written, and of those that are being replaced or deleted.
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


def list_checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first; temporary ones of a killed run are not among them, nor
    is anything with another name than a run gives.
    """
    there = in_step_order(directory.glob("step_*"))
    return [path for _, path in there if (path / COMPLETE).is_file()]


def rollout_name(step: int, rank: int | None = None) -> str:
    """The file of a step's responses; rank: that wrote it, where there are files of several."""
    return step_name(step, behind=f"{'' if rank is None else f'_rank_{rank:04d}'}.jsonl.gz")


def rollout_files(directory: Path) -> list[tuple[int, Path]]:
    """(step, path) of the files with responses, by step and rank; others are left out."""
    found = []
    for path in directory.glob("*"):
        if match := re.fullmatch("step_([0-9]{6,})(?:_rank_([0-9]{4,}))?[.]jsonl[.]gz", path.name):
            step, rank = int(match[1]), int(match[2]) if match[2] else None
            if path.name == rollout_name(step, rank):
                found.append((step, rank or 0, path))
    return [(step, path) for step, _, path in sorted(found)]
