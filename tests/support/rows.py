"""Files of rows, and the problems of one."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_opsft.data.problems import ProblemSet
from megatron_opsft.records import Problem


def write_rows(path: Path, rows: Iterable[Any]) -> str:
    """JSON lines; what is text already stands as it is. Returns: the path."""
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(path)


def problem_set(name: str, problems: Iterable[Problem]) -> ProblemSet:
    """As if read from the file `name`."""
    every = tuple(replace(problem, row=n) for n, problem in enumerate(problems, start=1))
    return ProblemSet(name=name, problems=every, bad_rows=(), sources=(name,))
