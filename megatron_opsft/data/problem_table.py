"""Problems and their prompts as an Arrow file that is mapped, not read: columns `id`, `text`,
`answer`, `before` and `fields` (as JSON), `row`, `part`, `prompt_ids`, and `sorted_hash` with
`sorted_row`, by which a problem's prompt is found.
"""

import hashlib
import json
import os
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import overload

import numpy
import pyarrow

from megatron_opsft.data.problems import BadRow, ProblemSet
from megatron_opsft.records import Message, Problem

_COLUMNS = ("id", "text", "answer", "before", "fields")
_ABOUT = b"problem_set"


class StoredProblems(Sequence[Problem]):
    """The problems of a table, each made when it is asked for."""

    def __init__(self, table: pyarrow.Table) -> None:
        self._columns = [table.column(name) for name in _COLUMNS]

    def __len__(self) -> int:
        return len(self._columns[0])

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Problem, ...]: ...
    def __getitem__(self, index: int | slice) -> Problem | tuple[Problem, ...]:
        if isinstance(index, slice):
            return tuple(self[n] for n in range(len(self))[index])
        problem_id, text, answer, before, fields = (c[index].as_py() for c in self._columns)
        return Problem(
            id=problem_id,
            text=text,
            answer=answer,
            before=tuple(Message(*message) for message in json.loads(before)) if before else (),
            fields=json.loads(fields) if fields else {},
        )


def prompt_key(problem: Problem) -> str:
    """What decides a problem's prompt."""
    return json.dumps([*problem.before, problem.text]) if problem.before else problem.text


class StoredPrompts:
    """The prompts of a table, found by a hash of what decides them."""

    def __init__(self, table: pyarrow.Table) -> None:
        self._problems, self._prompts = StoredProblems(table), table.column("prompt_ids")
        self._hashes = table.column("sorted_hash").chunk(0).to_numpy()
        self._rows = table.column("sorted_row")

    def find(self, problem: Problem) -> tuple[int, ...] | None:
        """The prompt's token ids; None where none of the problems has it."""
        key = prompt_key(problem)
        wanted = _hash(key)
        place = int(numpy.searchsorted(self._hashes, wanted))
        while place < len(self._hashes) and self._hashes[place] == wanted:
            row = self._rows[place].as_py()
            if prompt_key(self._problems[row]) == key:
                return tuple(self._prompts[row].as_py())
            place += 1
        return None


def write_table(path: Path, problems: ProblemSet, prompts: Mapping[str, array]) -> None:
    """prompts: by `prompt_key`, at least those of the problems; arrays of type "i".

    Whole or not at all; for one writer at a time. Errors: OSError.
    """
    texts = [problem.text for problem in problems.problems]
    before = [json.dumps(p.before) if p.before else "" for p in problems.problems]
    fields = [json.dumps(p.fields) if p.fields else "" for p in problems.problems]
    keys = [prompt_key(problem) for problem in problems.problems]
    hashes = numpy.array([_hash(key) for key in keys], dtype=numpy.int64)
    order = numpy.argsort(hashes, kind="stable")
    chosen = [prompts[key] for key in keys]
    offsets = numpy.cumsum([0, *map(len, chosen)], dtype=numpy.int64)
    values = numpy.concatenate([numpy.frombuffer(ids, dtype=numpy.int32) for ids in chosen])
    about = [problems.name, problems.sha256, problems.sources]
    bad_rows = [[bad.source, bad.row, bad.reason] for bad in problems.bad_rows]
    table = pyarrow.table(
        {
            "id": pyarrow.array([problem.id for problem in problems.problems]),
            "text": pyarrow.array(texts, pyarrow.large_string()),
            "answer": pyarrow.array([problem.answer for problem in problems.problems]),
            "before": pyarrow.array(before, pyarrow.large_string()),
            "fields": pyarrow.array(fields, pyarrow.large_string()),
            "row": pyarrow.array(problems.rows),
            "part": pyarrow.array(problems.parts or [None] * len(texts), pyarrow.int32()),
            "prompt_ids": pyarrow.LargeListArray.from_arrays(offsets, values),
            "sorted_hash": pyarrow.array(hashes[order]),
            "sorted_row": pyarrow.array(order),
        },
        metadata={_ABOUT: json.dumps([*about, bad_rows])},
    )
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            with pyarrow.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def open_table(path: Path) -> pyarrow.Table | None:
    """The file, mapped; None where there is none that can be read."""
    try:
        return pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()
    except (OSError, pyarrow.ArrowException):
        return None


def stored_set(table: pyarrow.Table) -> ProblemSet:
    """What was written."""
    name, sha256, sources, bad_rows = json.loads(table.schema.metadata[_ABOUT])
    return ProblemSet(
        name=name,
        problems=StoredProblems(table),
        rows=tuple(table.column("row").to_pylist()),
        bad_rows=tuple(BadRow(source=s, row=row, reason=reason) for s, row, reason in bad_rows),
        sha256=sha256,
        sources=tuple(sources),
        parts=tuple(table.column("part").to_pylist()) if sources else (),
    )


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
