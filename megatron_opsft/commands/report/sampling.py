"""Responses of a run or an evaluation for the page, sampled to a size while each file is read once.

Only whole groups are taken, and if possible those of the same problems in every step, so that a
problem is seen before and after. Problems are chosen by their hash: the same run gives the same
page.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_opsft.commands.report.html import encoded_size
from megatron_opsft.commands.report.token_use import parts_of, token_use_of
from megatron_opsft.errors import UserError, log
from megatron_opsft.records import JsonObject
from megatron_opsft.run.start.run_directory import HELD_OUT, held_out_files
from megatron_opsft.runtime.durable import rollout_files, whole_lines

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
_TOKEN_FIELDS = ("log_probs", "piece_lengths")  # if `run.save_logprobs` saved them
# What some responses have: the above, and where the tokens went.
_MORE_FIELDS = (*_TOKEN_FIELDS, "token_use", "parts")
_PROBLEM = re.compile(rb'"problem_id": "((?:[^"\\]|\\.)*)"')


def rollouts_of(run: Path) -> dict[int, list[Path]]:
    """Return step -> its files of responses."""
    files: dict[int, list[Path]] = {}
    for step, path in rollout_files(run / "rollouts"):
        files.setdefault(step, []).append(path)
    return files


def held_out_of(run: Path) -> dict[str, dict[int, list[Path]]]:
    """Return the files of a run's responses to held-out problems, by what a title says of the set
    ("held-out", "held-out, aime") and by step.
    """
    files_of: dict[str, dict[int, list[Path]]] = {}
    for step, path in held_out_files(run):
        folder = path.parent.name
        title = "held-out" if folder == HELD_OUT else f"held-out, {folder}"
        files_of.setdefault(title, {}).setdefault(step, []).append(path)
    return files_of


def evaluation_samples(evaluation: Path) -> dict[str, list[Path]]:
    """Return benchmark -> its files of responses."""
    ending = ".jsonl.gz"
    paths = (evaluation / "samples").glob(f"*{ending}")
    return {path.name.removesuffix(ending): [path] for path in paths}


def problem_key(step: Any, problem_id: str) -> str:
    """Return the key of a problem in a page: its id, after the benchmark if `step` is one, since
    two benchmarks may have equal ids.
    """
    return problem_id if isinstance(step, int) else f"{step}/{problem_id}"


def sample_responses(
    files: Mapping[Any, Sequence[Path]],
    max_bytes: int,
    texts: Mapping[tuple[str, str], str] | None = None,
) -> JsonObject:
    """Read responses that take about `max_bytes` as JSON, or fewer bytes.

    files: step or benchmark -> its files. texts: (benchmark, problem) -> text of the problem, of an
    evaluation. Returns

    - fields: names of a row's values; a row may lack the last ones, see `_MORE_FIELDS`;
    - rows: one for each response, by step, problem and number;
    - total: how many responses the files have;
    - problems: `problem_key` -> [text, gold answer], None for what the files do not have.
    """
    rows: list[list[Any]] = []
    problems: dict[str, list[str | None]] = {}
    total = 0
    room = max_bytes
    steps = _spread_out(sorted(files))
    for num_done, step in enumerate(steps):
        lines_of = _lines_by_problem(files[step])
        total += sum(map(len, lines_of.values()))
        fair_share = room // (len(steps) - num_done)
        used = 0  # bytes of this step's groups
        for lines in lines_of.values():
            group, group_problems = _parse_group(step, lines, texts or {})
            size = encoded_size([group, group_problems])
            # The first group may take all the room.
            limit = fair_share if used else room
            if used + size > limit:
                break
            rows += group
            problems |= group_problems
            used += size
        room -= used
    rows.sort(key=lambda row: row[:3])
    num_fields = max((len(row) for row in rows), default=len(FIELDS))
    fields = (*FIELDS, *_MORE_FIELDS)[:num_fields]
    return {"fields": fields, "rows": rows, "total": total, "problems": problems}


def _lines_by_problem(paths: Sequence[Path]) -> dict[bytes, list[bytes]]:
    """Return problem -> lines of its responses, in the order of the problems' hashes.

    A problem is its id as the file spells it: most lines of a long run are left out of the page, so
    they are not parsed.
    """
    lines_of: dict[bytes, list[bytes]] = {}
    for path in paths:
        try:
            for line in whole_lines(path):
                if match := _PROBLEM.search(line):
                    lines_of.setdefault(match[1], []).append(line)
        except UserError as error:
            # A killed process or a full disk may have torn the end of the file.
            log.warning("%s; its other responses are left out", error)
    return {problem: lines_of[problem] for problem in sorted(lines_of, key=_hash)}


def _hash(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=8).digest()


def _parse_group(
    step: Any, lines: Sequence[bytes], texts: Mapping[tuple[str, str], str]
) -> tuple[list[list[Any]], dict[str, list[Any]]]:
    """Return the rows of the responses to a problem in one step, in the order of `FIELDS` and
    `_MORE_FIELDS`, and its key -> [text, gold answer]. Damaged lines are left out.
    """
    rows: list[list[Any]] = []
    problems: dict[str, list[Any]] = {}
    for line in lines:
        try:
            values = json.loads(line, parse_constant=lambda _: None)
            row = [step, *(values.get(name) for name in FIELDS[1:])]
            problem_id = values["problem_id"]
            text = values.get("problem") or texts.get((str(step), problem_id))
            problems.setdefault(
                problem_key(step, problem_id), [text, values.get("gold")]
            )
        except (ValueError, RecursionError, AttributeError, TypeError, LookupError):
            continue
        token_values = [values.get(name) for name in _TOKEN_FIELDS]
        if not all(isinstance(value, list) for value in token_values):
            token_values = [None] * len(_TOKEN_FIELDS)
        use = token_use_of(values)
        row += [*token_values, use and use._asdict(), parts_of(values)]
        while len(row) > len(FIELDS) and row[-1] is None:
            row.pop()
        rows.append(row)
    return rows, problems


def _spread_out(steps: Sequence[Any]) -> list[Any]:
    """Reorder the steps so that the first few are always far apart: last, first, middle, ..."""
    # Multiples of a large power of two come first: of 8 in 8, 4, 12, 2, 6, 10, 14, 1, 3, ...
    inner = sorted(range(1, len(steps) - 1), key=_largest_power_of_two, reverse=True)
    ends = [*steps[-1:], *steps[:1]]  # the same one if there is only one
    return list(dict.fromkeys([*ends, *(steps[index] for index in inner)]))


def _largest_power_of_two(index: int) -> int:
    """Return the largest power of two that divides the index."""
    return index & -index
