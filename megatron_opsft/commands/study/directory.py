"""The directory of a study."""

from pathlib import Path

STUDY = "study.json"
TABLE = "table.json"


def is_study(directory: Path) -> bool:
    """Return True if a study has written its results to the directory."""
    return (directory / STUDY).is_file() or (directory / TABLE).is_file()
