"""Rows of a study's table.json, by section and name, over their seeds."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any


class NotMade(Exception):
    """A run that a line is about has no results."""


@dataclass(frozen=True, slots=True)
class Line:
    """One name of a section: its finished runs, a seed each."""

    name: str
    rows: Sequence[dict[str, Any]]

    def values(self, *keys: str) -> list[float]:
        """Of every seed: a field, or a field of a field. Errors: `NotMade`."""
        found: list[Any] = list(self.rows)
        for key in keys:
            found = [value and value[key] for value in found]
        if not found or None in found:
            raise NotMade(f"{self.name}: {'.'.join(keys)}")
        return found

    def mean(self, *keys: str) -> float:
        """Over seeds. Errors: `NotMade`."""
        return fmean(self.values(*keys))

    def deviation(self, *keys: str) -> float:
        """Of the seeds; 0 for one. Errors: `NotMade`."""
        return pstdev(self.values(*keys))

    @property
    def step_seconds(self) -> float:
        """Mean of a step. Errors: `NotMade`."""
        return self.mean("training", "seconds") / self.mean("training", "steps")

    @property
    def first(self) -> dict[str, Any]:
        """Of the first seed. Errors: `NotMade`."""
        if not self.rows:
            raise NotMade(self.name)
        return self.rows[0]


class Rows:
    """table.json"""

    def __init__(self, path: Path) -> None:
        self._rows = json.loads(path.read_text(encoding="utf-8"))

    def line(self, section: str, name: str) -> Line:
        """One name of a section; without rows where none is finished."""
        return Line(name, [row for row in self.of(section) if row["name"] == name])

    def lines(self, section: str) -> list[Line]:
        """All of a section that have results, in its order."""
        names = dict.fromkeys(row["name"] for row in self.of(section))
        return [self.line(section, name) for name in names]

    def of(self, section: str) -> list[dict[str, Any]]:
        """Finished runs of a section, a seed each."""
        return [r for r in self._rows if r["section"] == section and r["error"] is None]
