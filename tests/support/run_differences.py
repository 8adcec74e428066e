"""Whether two runs are the same run: every number and byte that does not depend on the clock."""

from itertools import zip_longest
from pathlib import Path
from typing import Any

from megatron_opsft.run.run_files import read_json_lines


def compare_runs(first: Path, second: Path) -> list[str]:
    """What differs between two run directories, one line each; empty for the same run.

    Compared exactly: metrics.jsonl and evals.jsonl but for keys that end in `_seconds`, rollouts,
    responses to held-out problems, and the exported weights.
    """
    directories, found = (first, second), []
    for name in ("metrics.jsonl", "evals.jsonl"):
        for number, rows in enumerate(zip_longest(*(read_lines(d / name) for d in directories)), 1):
            one, other = (row or {} for row in rows)
            found += [
                f"{name}, line {number}: {key} {one.get(key)} against {other.get(key)}"
                for key in sorted(one.keys() | other.keys())
                if one.get(key) != other.get(key)
            ]
    for pattern in ("rollouts/*", "held_out/**/*.gz", "hf/*.safetensors"):
        for path in sorted({p.relative_to(d) for d in directories for p in d.glob(pattern)}):
            contents = [(d / path).exists() and (d / path).read_bytes() for d in directories]
            if contents[0] != contents[1]:
                found.append(f"{path}: differs, or is in one run only")
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """As `read_json_lines`, without the timings."""
    return [
        {key: value for key, value in row.items() if not key.endswith("_seconds")}
        for row in read_json_lines(path)
    ]
