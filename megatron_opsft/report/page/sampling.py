"""Responses of a run or an evaluation for the page, sampled to a size while files are read once.

Whole groups are taken, of the same problems in every step where they can be: by the hash of the
problem, so that a problem is seen before and after, and the same run gives the same page.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError
from megatron_opsft.report.page.html import encoded_size
from megatron_opsft.runtime.durable import whole_lines

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


@dataclass(slots=True)
class _Group:
    """Responses of one problem in one step. problems: its id -> [text, gold]."""

    rows: list[list[Any]] = field(default_factory=list)
    problems: dict[str, list[str | None]] = field(default_factory=dict)
    num_bytes: int = 0

    def add(self, step: Any, fields: Mapping[str, Any]) -> int:
        """Returns the bytes that the group has become larger by."""
        row = [step, *(fields.get(name) for name in FIELDS[1:])]
        if all(isinstance(fields.get(name), list) for name in _SCORES):
            row += [fields[name] for name in _SCORES]
        size = encoded_size(row) + 1
        told = [t if isinstance(t := fields.get(k), str) else None for k in ("problem", "gold")]
        if any(text is not None for text in told) and not self.problems:
            self.problems[fields["problem_id"]] = told
            size += encoded_size(self.problems) + 1
        self.rows.append(row)
        self.num_bytes += size
        return size


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
        groups, count = _sample_step(step, files[step], room // (len(order) - place), room)
        total += count
        for group in groups:
            rows += group.rows
            problems |= group.problems
            room -= group.num_bytes
    rows.sort(key=lambda row: row[:3])
    scored = any(len(row) > len(FIELDS) for row in rows)
    return {"fields": FIELDS + _SCORES * scored, "rows": rows, "total": total, "problems": problems}


def _sample_step(
    step: Any, paths: Sequence[Path], share: int, room: int
) -> tuple[list[_Group], int]:
    """The groups of the first problems by hash that fit into `share` bytes, and how many responses
    the step has. The first of all may take as much as there is `room`. Holds little more than that.
    """
    groups: dict[bytes, _Group] = {}
    used = total = 0
    closed = b"\xff" * 9  # no problem from here on: one before it did not fit
    for line in _lines_of(paths):
        total += 1
        found = _PROBLEM.search(line)
        place = hashlib.blake2b(found[1] if found else b"", digest_size=8).digest()
        if found is None or place >= closed:
            continue  # most lines of a long run, which are not parsed
        try:
            fields = json.loads(line, parse_constant=lambda _: None)
        except (ValueError, RecursionError):
            continue
        if not isinstance(fields, dict) or not isinstance(fields.get("problem_id"), str):
            continue
        used += groups.setdefault(place, _Group()).add(step, fields)
        while groups and used > (room if len(groups) == 1 else share):
            closed = max(groups)
            used -= groups.pop(closed).num_bytes
    return [groups[place] for place in sorted(groups)], total


def _lines_of(paths: Sequence[Path]) -> Iterator[bytes]:
    """What can be read of each file: a killed process or a full disk may have torn its end."""
    for path in paths:
        try:
            yield from whole_lines(path)
        except UserError as error:
            log.warning("%s; its other responses are left out", error)


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
