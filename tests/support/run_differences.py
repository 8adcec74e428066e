"""Whether two runs are the same run: every number and byte that does not depend on the clock."""

from pathlib import Path
from typing import Any

from megatron_opsft.report.lines import read_json_lines

TIMING_SUFFIX = "_seconds"


def compare_runs(first: Path, second: Path) -> list[str]:
    """What differs between two run directories, one line each; empty for the same run.

    Compared exactly: metrics.jsonl and evals.jsonl but for keys that end in `_seconds`, rollouts,
    and the exported weights.
    """
    found: list[str] = []
    for name in ("metrics.jsonl", "evals.jsonl"):
        found += _compare_lines(name, read_lines(first / name), read_lines(second / name))
    for pattern in ("rollouts/*", "hf/*.safetensors"):
        found += _compare_files(pattern, first, second)
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """As `read_json_lines`, without the timings."""
    rows = read_json_lines(path)
    return [
        {key: value for key, value in row.items() if not key.endswith(TIMING_SUFFIX)}
        for row in rows
    ]


def _compare_lines(
    name: str, first: list[dict[str, Any]], second: list[dict[str, Any]]
) -> list[str]:
    if len(first) != len(second):
        return [f"{name}: {len(first)} lines against {len(second)}"]
    return [
        f"{name}, line {number}: {key} {one.get(key)} against {other.get(key)}"
        for number, (one, other) in enumerate(zip(first, second, strict=True), start=1)
        for key in sorted(one.keys() | other.keys())
        if one.get(key) != other.get(key)
    ]


def _compare_files(pattern: str, first: Path, second: Path) -> list[str]:
    names = sorted({p.relative_to(d) for d in (first, second) for p in d.glob(pattern)})
    found = []
    for name in names:
        contents = [
            (d / name).read_bytes() if (d / name).exists() else None for d in (first, second)
        ]
        if contents[0] != contents[1]:
            found.append(f"{name}: {'differs' if None not in contents else 'is in one run only'}")
    return found
