"""A row of a source -> a problem, or the reason why it cannot be one."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from megatron_opsft.data.answers import read_answer
from megatron_opsft.data.prompt_file import PromptFile
from megatron_opsft.data.sources import Row
from megatron_opsft.errors import RowError, UserError
from megatron_opsft.records import Message, Problem

PROBLEM_FIELDS = ("problem", "question", "prompt")
ANSWER_FIELDS = ("answer", "final_answer", "solution")
ID_FIELDS = ("id", "unique_id")
ABSENT = object()  # of a field that a row does not have; null is a value
_ROLES = ("system", "user", "assistant")
# What collections write where they have no answer, such as that of a theorem to prove.
_NO_ANSWERS = {"proof", "notfound", "not found", "n/a", "nan", "null", "no answer"}
_IMAGE_FIELDS, _IMAGE_TAG = ("image", "images"), "<image>"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReader:
    """Reads the rows of one source, in order.

    prompt_file: makes the text of each problem; with_fields: problems have the other columns of
    their rows. Ids are unique over its rows.
    """

    problem_field: str
    answer_field: str
    prompt_file: PromptFile | None
    with_fields: bool
    _taken_ids: set[str] = field(default_factory=set, init=False, repr=False)

    def read(self, row: Row) -> Problem:
        """Errors: `RowError`."""
        if row.error is not None:
            raise RowError(row.error)
        *before, last = self._messages(find_field(row.fields, self.problem_field))
        answer = find_field(row.fields, self.answer_field)
        gold = read_answer(None if answer is ABSENT else answer, self.answer_field)
        # A judge of the user's own knows what its answers mean.
        if not self.with_fields and gold.strip().casefold() in _NO_ANSWERS:
            raise RowError(
                f"{self.answer_field} is {gold.strip()!r}, which is no answer"
            )
        if _IMAGE_TAG in last.content or any(
            row.fields.get(name) for name in _IMAGE_FIELDS
        ):
            raise RowError("it has an image, and only text is trained on")
        text, problem_id = last.content, self._choose_id(row)
        if self.prompt_file is not None:
            text = self.prompt_file.render(text, row.fields)
        for said in (problem_id, gold, text, *(message.content for message in before)):
            _check_unicode(said)
        self._taken_ids.add(problem_id)
        return Problem(
            id=problem_id,
            text=text,
            answer=gold,
            before=tuple(before),
            row=row.number,
            fields=_other_columns(row, self.problem_field) if self.with_fields else {},
        )

    def _messages(self, value: object) -> list[Message]:
        """Text is one message, or the JSON of several."""
        name = self.problem_field
        if isinstance(value, str) and value.lstrip().startswith("[{"):
            with suppress(ValueError, RecursionError):
                read = json.loads(value)
                if all(isinstance(item, dict) and "role" in item for item in read):
                    value = read
        if value is ABSENT or value is None:
            raise RowError(f"no {name}")
        if isinstance(value, list):
            return _read_messages(value, name)
        if not isinstance(value, str):
            raise RowError(f"{name} is of type {type(value).__name__}, not text")
        if not value.strip():
            raise RowError(f"{name} is empty")
        return [Message(role="user", content=value)]

    def _choose_id(self, row: Row) -> str:
        """The row's own id, or one of its number; the row number is added to one that is taken.

        Never of the file's name: the seeds of responses come from ids, and a file may move.
        """
        given = next(
            (row.fields[name] for name in ID_FIELDS if name in row.fields), None
        )
        usable = (
            isinstance(given, str | int)
            and not isinstance(given, bool)
            and str(given).strip()
        )
        problem_id = str(given) if usable else f"row-{row.number}"
        while problem_id in self._taken_ids:
            problem_id = f"{problem_id}-{row.number}"
        return problem_id


def find_field(fields: Mapping[str, Any], name: str) -> Any:
    """The value of a field, or `ABSENT`. A dotted name reaches into objects, as
    `reward_model.ground_truth` does into `{"reward_model": {"ground_truth": "42"}}`; a field of
    that very name comes first.
    """
    if name in fields:
        return fields[name]
    first, dot, rest = name.partition(".")
    inner = fields.get(first)
    return find_field(inner, rest) if dot and isinstance(inner, Mapping) else ABSENT


def _names_of(fields: Mapping[str, Any]) -> Iterator[str]:
    """How the fields can be called; those of an object by their dotted names, in its place."""
    for name, value in fields.items():
        if isinstance(value, Mapping) and value:
            yield from (f"{name}.{inner}" for inner in _names_of(value))
        else:
            yield name


def choose_fields(
    source: str,
    rows: Sequence[Row],
    wanted: Sequence[tuple[str, str | None, tuple[str, ...]]],
) -> list[str]:
    """The field of each of `wanted`: (its key, for errors; the user's field, which may be dotted;
    the fields that are tried without one). Of the latter the one that most rows have.

    Errors: `UserError` naming every key whose field no row has.
    """
    chosen: list[str] = []
    missing: dict[str, str] = {}
    for key, given, candidates in wanted:
        names = (given,) if given is not None else candidates
        counts = {
            name: sum(find_field(row.fields, name) is not ABSENT for row in rows)
            for name in names
        }
        chosen.append(max(names, key=lambda name: counts[name]))
        if not any(counts.values()):
            missing[key] = " or ".join(names)
    if missing and any(row.error is None for row in rows):
        present = ", ".join(
            sorted({name for row in rows for name in _names_of(row.fields)})
        )
        raise UserError(
            f"{', '.join(missing)}: {source} has no field {', and no '.join(missing.values())}; "
            f"it has {present}: set {' and '.join(missing)}"
            f"{' to one of them' if len(missing) == 1 else ''}"
        )
    return chosen


def _read_messages(value: list[object], field: str) -> list[Message]:
    """field: what errors call them. Errors: `RowError` for what is no chat that a user ends."""
    messages = [
        Message(item["role"], item["content"])
        for item in value
        if isinstance(item, Mapping)
        and item.get("role") in _ROLES
        and isinstance(item.get("content"), str)
        and item["content"].strip()
    ]
    roles = [message.role for message in messages]
    if len(roles) < len(value) or roles[-1:] != ["user"] or "system" in roles[1:]:
        raise RowError(
            f"{field} is not a chat: write messages with role ({', '.join(_ROLES)}) and content "
            "(text), a system message first if at all, the user's last"
        )
    return messages


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


def _check_unicode(text: str) -> None:
    """Errors: `RowError` for text that JSON can write (`\\ud83d` alone), but no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RowError(
            "a text is not valid Unicode: half of a surrogate pair"
        ) from None
