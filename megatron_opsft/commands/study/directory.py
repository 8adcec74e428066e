"""The directory of a study."""

from pathlib import Path

STUDY, TABLE = "study.json", "table.json"


def is_study(directory: Path) -> bool:
    """Return True if a study has written its results to the directory."""
    return any((directory / name).is_file() for name in (STUDY, TABLE))
