"""Whether two runs are the same run: every number and byte that does not depend on the clock."""

from pathlib import Path
from typing import Any

from megatron_opsft.report.runs import read_json_lines


def compare_runs(first: Path, second: Path) -> list[str]:
    """What differs between two run directories, one line each; empty for the same run.

    Compared exactly: metrics.jsonl and evals.jsonl but for keys that end in `_seconds`, rollouts,
    and the exported weights.
    """
    found: list[str] = []
    for name in ("metrics.jsonl", "evals.jsonl"):
        rows, others = (read_lines(directory / name) for directory in (first, second))
        if len(rows) != len(others):
            found.append(f"{name}: {len(rows)} lines against {len(others)}")
            continue
        found += [
            f"{name}, line {number}: {key} {one.get(key)} against {other.get(key)}"
            for number, (one, other) in enumerate(zip(rows, others, strict=True), start=1)
            for key in sorted(one.keys() | other.keys())
            if one.get(key) != other.get(key)
        ]
    directories = (first, second)
    for pattern in ("rollouts/*", "hf/*.safetensors"):
        for path in sorted({p.relative_to(d) for d in directories for p in d.glob(pattern)}):
            contents = [(d / path).read_bytes() for d in directories if (d / path).exists()]
            if len(contents) < 2:
                found.append(f"{path}: is in one run only")
            elif contents[0] != contents[1]:
                found.append(f"{path}: differs")
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """As `read_json_lines`, without the timings."""
    return [
        {key: value for key, value in row.items() if not key.endswith("_seconds")}
        for row in read_json_lines(path)
    ]
