"""Responses of a run or an evaluation for the page, sampled to a size while files are read once.

Whole groups are taken, of the same problems in every step where they can be: by the hash of the
problem, so that a problem is seen before and after, and the same run gives the same page.
"""

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_opsft.commands.report.html import encoded_size
from megatron_opsft.errors import UserError
from megatron_opsft.runtime.durable import rollout_files, whole_lines

log = logging.getLogger("megatron_opsft")
FIELDS = (
    "step",
    "problem_id",
    "sample_index",
    "outcome",
    "answer",
    "reward",
    "advantage",
    "finish_reason",
    "num_tokens",
    "text",
)
_SCORES = ("log_probs", "piece_lengths")  # where `run.save_logprobs` has saved them
_PROBLEM = re.compile(rb'"problem_id": "((?:[^"\\]|\\.)*)"')


def rollouts_of(run: Path) -> dict[int, list[Path]]:
    """Step -> its files of responses."""
    steps: dict[int, list[Path]] = {}
    for step, path in rollout_files(run / "rollouts"):
        steps.setdefault(step, []).append(path)
    return steps


def samples_of(evaluation: Path) -> dict[str, list[Path]]:
    """Benchmark -> its files of samples."""
    ending = ".jsonl.gz"
    paths = sorted((evaluation / "samples").glob(f"*{ending}"))
    return {path.name.removesuffix(ending): [path] for path in paths}


def sample_responses(
    files: Mapping[Any, Sequence[Path]], max_bytes: int
) -> dict[str, Any]:
    """files: step, or benchmark -> its files. At most about `max_bytes` as JSON.

    Returns fields: of each row, the last two where they were saved; rows: by step, problem and
    sample; total: responses there are; problems: id -> [text, gold], where the files have them.
    """
    rows: list[list[Any]] = []
    problems: dict[str, list[str | None]] = {}
    total, room = 0, max_bytes
    order = _spread(sorted(files)) if files else []
    for place, step in enumerate(order):
        lines_of = _lines_by_problem(files[step])
        total += sum(map(len, lines_of.values()))
        share, used = room // (len(order) - place), 0
        for lines in lines_of.values():
            group, told = _group(step, lines)
            size = encoded_size([group, told])
            if used + size > (
                share if used else room
            ):  # the first may take all the room
                break
            rows += group
            problems |= told
            used += size
        room -= used
    rows.sort(key=lambda row: row[:3])
    scored = any(len(row) > len(FIELDS) for row in rows)
    return {
        "fields": FIELDS + _SCORES * scored,
        "rows": rows,
        "total": total,
        "problems": problems,
    }


def _lines_by_problem(paths: Sequence[Path]) -> dict[bytes, list[bytes]]:
    """By the problem's id as it is written, in the order of its hash. Most lines of a long run are
    not parsed further.
    """
    found: dict[bytes, list[bytes]] = {}
    for path in paths:
        try:
            for line in whole_lines(path):
                if problem := _PROBLEM.search(line):
                    found.setdefault(problem[1], []).append(line)
        except (
            UserError
        ) as error:  # a killed process or a full disk may have torn its end
            log.warning("%s; its other responses are left out", error)
    by_hash = sorted(
        found, key=lambda each: hashlib.blake2b(each, digest_size=8).digest()
    )
    return {problem: found[problem] for problem in by_hash}


def _group(
    step: Any, lines: Sequence[bytes]
) -> tuple[list[list[Any]], dict[str, list[Any]]]:
    """Rows of the responses to a problem in one step, and its id -> [text, gold]."""
    rows: list[list[Any]] = []
    problems: dict[str, list[Any]] = {}
    for line in lines:
        try:
            fields = json.loads(line, parse_constant=lambda _: None)
            row = [step, *(fields.get(name) for name in FIELDS[1:])]
        except (ValueError, RecursionError, AttributeError):
            continue
        if all(isinstance(fields.get(name), list) for name in _SCORES):
            row += [fields[name] for name in _SCORES]
        rows.append(row)
        problems.setdefault(row[1], [fields.get("problem"), fields.get("gold")])
    return rows, problems


def _spread(steps: Sequence[Any]) -> list[Any]:
    """The same steps, so that any beginning of them is spread: last, first, then the middles."""
    middles = sorted(range(1, len(steps) - 1), key=lambda place: -(place & -place))
    return list(
        dict.fromkeys([steps[-1], steps[0], *(steps[place] for place in middles)])
    )
