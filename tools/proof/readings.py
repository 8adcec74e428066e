"""The figures that a stage left: JSON lines on its standard output, or pytest's JUnit file."""

import json
import math
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """figures: for the table. problems: what was found wrong, one line each. details: the rest.

    nothing_ran: why there was nothing to prove here, empty if there was.
    """

    figures: Mapping[str, float] = field(default_factory=dict)
    problems: Sequence[str] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    nothing_ran: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number of the first JSON line that has `key` and the values of `where`, divided by `unit`.

    optional: it may be missing, as the share of peak of an unknown GPU.
    """

    name: str
    key: str
    where: Mapping[str, Any] = field(default_factory=dict)
    unit: float = 1.0
    optional: bool = False


def strict(reading: Reading) -> Reading:
    """The same in numbers that JSON has: a figure that is none of them is a problem instead."""
    wrong = {name: value for name, value in reading.figures.items() if not math.isfinite(value)}
    return Reading(
        figures={name: value for name, value in reading.figures.items() if name not in wrong},
        problems=[*reading.problems, *(f"{name} is {value}" for name, value in wrong.items())],
        details=_named_infinities(dict(reading.details)),
        nothing_ran=reading.nothing_ran,
    )


def _named_infinities(value: Any) -> Any:
    """Numbers that JSON has not become their names, at any depth."""
    if isinstance(value, dict):
        return {key: _named_infinities(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_named_infinities(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects among the lines of a log; other lines are passed over."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return found


def read_lines(log: Path, wanted: Sequence[Figure]) -> Reading:
    """Of a benchmark: the wanted figures, all lines kept."""
    lines = json_lines(log)
    figures, problems = {}, []
    for figure in wanted:
        values = [
            line[figure.key]
            for line in lines
            if figure.key in line and figure.where.items() <= line.items()
        ]
        if values:
            figures[figure.name] = float(values[0]) / figure.unit
        elif not figure.optional:
            problems.append(f"no {figure.key} among its JSON lines")
    return Reading(figures=figures, problems=problems, details={"lines": lines})


def read_report(log: Path) -> Reading:
    """Of a stage of our own: its one JSON line has figures, problems and details."""
    reports = [line for line in json_lines(log) if line.keys() >= {"figures", "problems"}]
    if not reports:
        return Reading(problems=["it printed no report"])
    (*_, last) = reports
    return Reading(
        figures={name: float(value) for name, value in last["figures"].items()},
        problems=last["problems"],
        details=last.get("details", {}),
    )


def read_tests(junit: Path) -> Reading:
    """Of pytest: counts, the names of failing tests, and why others were skipped."""
    if not junit.exists():
        return Reading(problems=["pytest wrote no results"])
    counts = Counter(passed=0, failed=0, skipped=0)
    failing, reasons = [], Counter[str]()
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        wrong = [node for tag in ("failure", "error") for node in case.findall(tag)]
        skipped = case.find("skipped")
        if wrong:
            counts["failed"] += 1
            message = (wrong[0].get("message") or "").split("\n")[0]
            failing.append(f"{name}: {message}"[:300])
        elif skipped is not None:
            counts["skipped"] += 1
            reasons[skipped.get("message") or "without a reason"] += 1
        else:
            counts["passed"] += 1
    nothing_ran = ""
    if not counts["passed"] and not failing:
        nothing_ran = "; ".join(reason for reason, _ in reasons.most_common(2)) or "no test ran"
    return Reading(
        figures=dict(counts),
        problems=failing,
        details={"skipped": dict(reasons)},
        nothing_ran=nothing_ran,
    )


def formatted(figures: Mapping[str, float]) -> str:
    """Such as `passed 40, failed 0, mfu 0.41`."""
    return ", ".join(f"{name} {_number(value)}" for name, value in figures.items())


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
