"""Rows of a source made into problems; a row that cannot be one is a `RowError` with the reason."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from megatron_opsft.data.answers import read_answer
from megatron_opsft.data.prompt_file import PromptFile
from megatron_opsft.data.text_files import Row
from megatron_opsft.errors import RowError, UserError
from megatron_opsft.records import Message, Problem

PROBLEM_FIELDS = (
    "problem",
    "question",
    "prompt",
)
ANSWER_FIELDS = (
    "answer",
    "final_answer",
    "solution",
)
# Columns of whole chats, as OpenAI's fine-tuning takes them and as ShareGPT exports them: problem
# and answer are read from one.
CHATS_FIELD = "messages"
SHAREGPT_FIELD = "conversations"
ID_FIELDS = ("id", "unique_id")
ABSENT = object()  # the value of a field that a row does not have; null is a value
_ROLES = ("system", "user", "assistant")
# ShareGPT's names of roles, and OpenAI's newer one of the system's.
_OTHER_ROLES = {"human": "user", "gpt": "assistant", "developer": "system"}
# Collections write these if a problem has no answer, such as a theorem to prove.
_NO_ANSWERS = {
    "proof",
    "notfound",
    "not found",
    "n/a",
    "nan",
    "null",
    "no answer",
}
_IMAGE_FIELDS = ("image", "images")
_IMAGE_TAG = "<image>"


def read_problem(
    row: Row,
    *,
    problem_field: str,
    answer_field: str,
    prompt_file: PromptFile | None,
    with_fields: bool,
) -> Problem:
    """Make a problem of the row. Ids need not be unique: another row may have the same.

    problem_field, answer_field: if they are the same, its chats end with the answer. An answer may
    be a message of the assistant's alone, as TRL writes a `completion`.
    prompt_file: makes the text of the problem, if any. with_fields: True to give it the remaining
    columns of the row. Errors: `RowError`.
    """
    if row.error is not None:
        raise RowError(row.error)
    value = find_field(row.fields, problem_field)
    answer: object
    if answer_field == problem_field:
        chat, answer = _chat_and_answer(value, problem_field)
    else:
        chat = _messages(value, problem_field)
        answer = _answer_of(find_field(row.fields, answer_field), answer_field)
    *before, last = chat
    gold = read_answer(None if answer is ABSENT else answer, answer_field)
    # A judge of the user's own knows what its answers mean.
    if not with_fields and gold.strip().casefold() in _NO_ANSWERS:
        raise RowError(f"{answer_field} is {gold.strip()!r}, which is no answer")
    images = [row.fields.get(name) for name in _IMAGE_FIELDS]
    has_tag = any(_IMAGE_TAG in message.content for message in (*before, last))
    if has_tag or any(images):
        raise RowError("it has an image, and only text is trained on")
    text = last.content
    problem_id = _id_of(row)
    if prompt_file is not None:
        text = prompt_file.render(text, row.fields)
    for value in (problem_id, gold, text, *(message.content for message in before)):
        _check_unicode(value)
    return Problem(
        id=problem_id,
        text=text,
        answer=gold,
        before=tuple(before),
        row=row.number,
        fields=_other_columns(row, problem_field) if with_fields else {},
    )


def _messages(value: object, name: str) -> list[Message]:
    """Read the messages of the field `name`: text is one message, or the JSON of several."""
    value = _parse_chat(value)
    if value is ABSENT or value is None:
        raise RowError(f"no {name}")
    if isinstance(value, list):
        return _read_messages(value, name)
    if not isinstance(value, str):
        raise RowError(f"{name} is of type {type(value).__name__}, not text")
    if not value.strip():
        raise RowError(f"{name} is empty")
    return [Message(role="user", content=value)]


def _parse_chat(value: object) -> object:
    """Return the list of messages if `value` is the JSON of one, else the value itself."""
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        with suppress(ValueError, RecursionError):
            items: list[object] = json.loads(value)
            if all(map(_is_message, items)):
                return items
    return value


def _is_message(item: object) -> bool:
    """True if a value has the shape of a message: OpenAI's keys, or ShareGPT's."""
    if not isinstance(item, Mapping):
        return False
    return "role" in item or {"from", "value"} <= item.keys()


def _role_of(message: Mapping[str, Any]) -> object:
    """Return the role of a message in OpenAI's words, such as "user" for ShareGPT's "human"."""
    role = message.get("role")
    if role is None:
        role = message.get("from")
    return _OTHER_ROLES.get(role, role) if isinstance(role, str) else role


def _content_of(message: Mapping[str, Any]) -> object:
    """Return what a message says: text, if it is one that can be read."""
    content = message.get("content")
    return _text_of(message.get("value") if content is None else content)


def _answer_of(value: object, name: str) -> object:
    """Return the text of a message of the assistant's that stands alone in a list; any other value
    as it is. Errors: `RowError` for a chat of several messages or of another role.
    """
    chat = _parse_chat(value)
    if not isinstance(chat, list) or not chat or not all(map(_is_message, chat)):
        return value
    text = _content_of(chat[0])
    if len(chat) > 1 or _role_of(chat[0]) != "assistant" or not isinstance(text, str):
        raise RowError(
            f"{name} is a chat: write one message of the assistant's, with text as its content; or "
            "set data.problem_field and data.answer_field to one column with the whole chat"
        )
    return text


def _chat_and_answer(value: object, name: str) -> tuple[list[Message], str]:
    """Split the chat of the field `name`: the messages before the assistant's last, and the text of
    that. Errors: `RowError` for anything but a chat that ends so.
    """
    chat = _parse_chat(value)
    last = chat[-1] if isinstance(chat, list) and chat else None
    if not isinstance(last, Mapping) or _role_of(last) != "assistant":
        raise RowError(
            f"{name} is not a chat that ends with the assistant's answer: write that last, with "
            "role and content, or from and value"
        )
    assert isinstance(chat, list)
    answer = _content_of(last)
    if not isinstance(answer, str):
        raise RowError(f"{name}: the assistant's answer is not text")
    return _read_messages(chat[:-1], name), answer


def field_of_chats(rows: Sequence[Row]) -> str | None:
    """Return `CHATS_FIELD` if more rows have it than any of the usual fields of problem and answer;
    `SHAREGPT_FIELD` if rows have it and no row any of these; else None.
    """
    usual = (*PROBLEM_FIELDS, *ANSWER_FIELDS)
    most = max(_num_rows_with(rows, name) for name in usual)
    if _num_rows_with(rows, CHATS_FIELD) > most:
        return CHATS_FIELD
    if most == 0 and _num_rows_with(rows, SHAREGPT_FIELD):
        return SHAREGPT_FIELD
    return None


def _id_of(row: Row) -> str:
    """Return the row's own id, or one made of its number.

    Never the file's name: the seeds of responses come from ids, and a file may move.
    """
    for name in ID_FIELDS:
        if name in row.fields:
            value = row.fields[name]
            is_id = isinstance(value, str | int) and not isinstance(value, bool)
            if is_id and str(value).strip():
                return str(value)
            break
    return f"row-{row.number}"


def find_field(fields: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field, or `ABSENT`.

    A dotted name reaches into objects, as `reward_model.ground_truth` does into
    `{"reward_model": {"ground_truth": "42"}}`, and into lists, as `answer.0`; a field of that very
    name comes first.
    """
    if name in fields:
        return fields[name]
    first, dot, inner_name = name.partition(".")
    inner = fields.get(first)
    if dot and isinstance(inner, list):
        inner = {str(number): item for number, item in enumerate(inner)}
    if dot and isinstance(inner, Mapping):
        return find_field(inner, inner_name)
    return ABSENT


def _names_of(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the fields; instead of an object's the dotted names of its fields."""
    for name, value in fields.items():
        if isinstance(value, Mapping) and value:
            yield from (f"{name}.{inner}" for inner in _names_of(value))
        else:
            yield name


def choose_fields(
    source: str, rows: Sequence[Row], wanted: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return the name of each wanted field: the one of its candidates that most rows have.

    wanted: the config key of each field, for errors, and its candidates, which may be dotted: the
    user's choice alone, or the common names. Errors: `UserError` naming every key whose field no
    row has.
    """
    chosen = []
    missing = {}
    for key, names in wanted.items():
        counts = {name: _num_rows_with(rows, name) for name in names}
        most_common = max(names, key=counts.__getitem__)  # the first of several
        chosen.append(most_common)
        if counts[most_common] == 0:
            missing[key] = " or ".join(names)
    if missing and any(row.error is None for row in rows):
        present = set[str]().union(*(_names_of(row.fields) for row in rows))
        hint = " to one of them" if len(missing) == 1 else ""
        if source.removesuffix(".gz").endswith((".csv", ".tsv")):
            hint += (
                "; the first line was taken as the header, so write one if it is a row"
            )
        raise UserError(
            f"{', '.join(missing)}: {source} has no field {', and no '.join(missing.values())}; "
            f"it has {', '.join(sorted(present))}: set {' and '.join(missing)}{hint}"
        )
    return chosen


def _num_rows_with(rows: Sequence[Row], name: str) -> int:
    return sum(find_field(row.fields, name) is not ABSENT for row in rows)


def _read_messages(items: list[object], field_name: str) -> list[Message]:
    """Read the messages of a chat. Errors: `RowError` for anything but a chat that a user ends."""
    messages = []
    for item in items:
        if not isinstance(item, Mapping):
            continue
        role, content = _role_of(item), _content_of(item)
        is_text = isinstance(content, str) and content.strip()
        if is_text and isinstance(role, str) and role in _ROLES:
            messages.append(Message(role, str(content)))
    roles = [message.role for message in messages]
    if len(roles) < len(items) or roles[-1:] != ["user"] or "system" in roles[1:]:
        raise RowError(
            f"{field_name} is not a chat: write messages with role ({', '.join(_ROLES)}) and "
            "content (text), a system message first if at all, the user's last"
        )
    return messages


def _text_of(content: object) -> object:
    """Return the text of a message's content that is a list of parts of type text; any other
    content as it is.
    """
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str) or part.get("type") != "text":
            return content
        texts.append(text)
    return "".join(texts)


def _other_columns(row: Row, problem_field: str) -> dict[str, Any]:
    """Return the columns but the problem's that JSON can hold, so no pictures, dates or NaN."""
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
