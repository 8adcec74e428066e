"""Responses of a run or an evaluation for the page, sampled to a size while files are read once.

Whole groups are taken, of the same problems in every step where they can be: by the hash of the
problem, so that a problem is seen before and after, and the same run gives the same page.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_opsft.report.lines import response_lines
from megatron_opsft.report.page.html import encoded_size
from megatron_opsft.runtime.step_names import rollout_files

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
# Cannot be part of a text: its quotes would have backslashes there.
_TOKENS = b', "response_ids": ['
_PROBLEM = re.compile(rb'"problem_id": ("(?:[^"\\]|\\.)*")')


@dataclass(slots=True)
class _Group:
    """Responses of one problem in one step."""

    rows: list[list[Any]] = field(default_factory=list)
    problem: str | None = None
    gold: str | None = None
    num_bytes: int = 0


def rollouts_of(run: Path) -> dict[int, list[Path]]:
    """Step -> its files of responses."""
    steps: dict[int, list[Path]] = {}
    directory = run / "rollouts"
    for step, path in rollout_files(directory) if directory.is_dir() else ():
        steps.setdefault(step, []).append(path)
    return steps


def sample_responses(files: Mapping[Any, Sequence[Path]], max_bytes: int) -> dict[str, Any]:
    """files: step, or benchmark -> its files. At most about `max_bytes` as JSON.

    Returns fields: of each row, the last two where they were saved; rows: by step, problem and
    sample; total: responses there are; problems: id -> [text, gold], where the files have them.
    """
    rows: list[list[Any]] = []
    problems: dict[str, list[str | None]] = {}
    total, room = 0, max_bytes
    order = _spread(sorted(files))
    for place, step in enumerate(order):
        chosen, count = _sample_step(step, files[step], room // (len(order) - place), room)
        total += count
        for problem_id, group in chosen.items():
            rows += group.rows
            room -= group.num_bytes
            if group.problem is not None or group.gold is not None:
                problems[problem_id] = [group.problem, group.gold]
    rows.sort(key=lambda row: row[:3])
    scored = any(len(row) > len(FIELDS) for row in rows)
    return {"fields": FIELDS + _SCORES * scored, "rows": rows, "total": total, "problems": problems}


def _sample_step(
    step: Any, paths: Sequence[Path], share: int, room: int
) -> tuple[dict[str, _Group], int]:
    """The groups of the first problems by hash that fit into `share` bytes, and how many responses
    the step has. The first of all may take as much as there is `room`. Holds little more than that.
    """
    groups: dict[int, tuple[str, _Group]] = {}
    used = total = 0
    closed = 1 << 64  # no problem from here on: one before it did not fit
    for _, line in chain.from_iterable(map(response_lines, paths)):
        total += 1
        place = _hash(_problem_of(line))
        if place >= closed:
            continue
        row = _parse(line, step)
        if row is None:
            continue
        group = groups.setdefault(place, (row["problem_id"], _Group()))[1]
        used += _add(group, row)
        while groups and used > (room if len(groups) == 1 else share):
            closed = max(groups)
            used -= groups.pop(closed)[1].num_bytes
    return dict(groups[place] for place in sorted(groups)), total


def _add(group: _Group, fields: dict[str, Any]) -> int:
    """Bytes that the group has become larger by."""
    row = [fields.get(name) for name in FIELDS]
    if all(isinstance(fields.get(name), list) for name in _SCORES):
        row += [fields[name] for name in _SCORES]
    size = encoded_size(row) + 1
    if group.problem is None and isinstance(fields.get("problem"), str):
        group.problem = fields["problem"]
        size += encoded_size(group.problem) + encoded_size(fields["problem_id"]) + 20
    if group.gold is None and isinstance(fields.get("gold"), str):
        group.gold = fields["gold"]
        size += encoded_size(group.gold)
    group.rows.append(row)
    group.num_bytes += size
    return size


def _problem_of(line: bytes) -> str:
    """The problem's id, without parsing the line; "" where it has none."""
    found = _PROBLEM.search(line)
    try:
        return str(json.loads(found[1])) if found else ""
    except ValueError:
        return ""


def _parse(line: bytes, step: Any) -> dict[str, Any] | None:
    """The fields but for the tokens, which are most of the line and are not shown."""
    start = line.find(_TOKENS)
    if start >= 0:
        line = line[:start] + line[line.find(b"]", start) + 1 :]
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_response = isinstance(fields, dict) and isinstance(fields.get("problem_id"), str)
    return {**fields, "step": step} if is_response else None


def _hash(problem_id: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(problem_id.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big"
    )


def _spread(steps: Sequence[Any]) -> list[Any]:
    """The same steps, so that any beginning of them is spread: last, first, then the middles."""
    order = [steps[-1], steps[0]] if len(steps) > 1 else list(steps)
    gaps = [(0, len(steps) - 1)]
    for low, high in gaps:
        middle = (low + high) // 2
        if middle > low:
            order.append(steps[middle])
            gaps += [(low, middle), (middle, high)]
    return order
