"""A row of a source -> a problem, or the reason why it cannot be one."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from megatron_opsft.data.answers import read_answer
from megatron_opsft.data.fields import ABSENT, find_field, names_of
from megatron_opsft.data.messages import read_messages
from megatron_opsft.data.prompt_file import PromptFile
from megatron_opsft.data.sources import Row
from megatron_opsft.errors import RowError, UserError
from megatron_opsft.records import Message, Problem

PROBLEM_FIELDS = ("problem", "question", "prompt")
ANSWER_FIELDS = ("answer", "final_answer", "solution")
ID_FIELDS = ("id", "unique_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReader:
    """Reads the rows of one source, in order.

    stem: the beginning of the ids of rows without one; prompt_file: makes the text of each problem;
    with_fields: problems have the other columns of their rows. Ids are unique over its rows.
    """

    stem: str
    problem_field: str
    answer_field: str
    prompt_file: PromptFile | None
    with_fields: bool
    _taken_ids: set[str] = field(default_factory=set, init=False, repr=False)

    def read(self, row: Row) -> Problem:
        """Errors: `RowError`."""
        if row.error is not None:
            raise RowError(row.error)
        answer = find_field(row.fields, self.answer_field)
        _check_unicode({name: row.fields.get(name) for name in ID_FIELDS})
        _check_unicode({self.answer_field: answer})
        *before, last = self._read_messages(find_field(row.fields, self.problem_field))
        _check_unicode({self.problem_field: "".join(m.content for m in (*before, last))})
        text = last.content
        gold = read_answer(None if answer is ABSENT else answer, self.answer_field)
        if self.prompt_file is not None:
            text = self.prompt_file.render(text, row.fields)
            _check_unicode({"what data.template makes of it": text})
        return Problem(
            id=self._choose_id(row),
            text=text,
            answer=gold,
            before=tuple(before),
            fields=_other_columns(row, self.problem_field) if self.with_fields else {},
        )

    def _read_messages(self, value: object) -> tuple[Message, ...]:
        """Text is one message."""
        name = self.problem_field
        if value is ABSENT or value is None:
            raise RowError(f"no {name}")
        if isinstance(value, list):
            return read_messages(value, name)
        if not isinstance(value, str):
            raise RowError(f"{name} is of type {type(value).__name__}, not text")
        if not value.strip():
            raise RowError(f"{name} is empty")
        return (Message(role="user", content=value),)

    def _choose_id(self, row: Row) -> str:
        """The row's own id, or stem and row number; the row number is added to one that is
        taken.
        """
        given = next((row.fields[name] for name in ID_FIELDS if name in row.fields), None)
        usable = isinstance(given, str | int) and not isinstance(given, bool) and str(given).strip()
        problem_id = str(given) if usable else f"{self.stem}-{row.number}"
        while problem_id in self._taken_ids:
            problem_id = f"{problem_id}-{row.number}"
        self._taken_ids.add(problem_id)
        return problem_id


def choose_field(
    source: str, rows: Sequence[Row], wanted: str | None, candidates: tuple[str, ...], key: str
) -> str:
    """The user's field, which may be dotted, else the candidate that most rows have. key: what
    errors call it. Errors: `UserError` if no row has it.
    """
    names = (wanted,) if wanted is not None else candidates
    counts = {
        name: sum(find_field(row.fields, name) is not ABSENT for row in rows) for name in names
    }
    best = max(names, key=lambda name: counts[name])
    if any(row.error is None for row in rows) and not counts[best]:
        present = sorted({name for row in rows for name in names_of(row.fields)})
        raise UserError(
            f"{key}: {source} has no field {' or '.join(names)}; it has {', '.join(present)}: "
            f"set {key} to one of them"
        )
    return best


def _other_columns(row: Row, problem_field: str) -> dict[str, Any]:
    """Those that JSON can hold: no pictures, dates, NaN."""
    columns = {}
    for name, value in row.fields.items():
        if name == problem_field:
            continue
        with suppress(TypeError, ValueError, RecursionError):
            json.dumps(value, allow_nan=False)
            columns[name] = value
    return columns


def _check_unicode(texts: Mapping[str, object]) -> None:
    """Errors: `RowError` for text that JSON can write (`\\ud83d` alone), but no tokenizer takes."""
    for name, text in texts.items():
        try:
            if isinstance(text, str):
                text.encode("utf-8")
        except UnicodeEncodeError:
            raise RowError(f"{name} is no valid Unicode: half of a surrogate pair") from None
