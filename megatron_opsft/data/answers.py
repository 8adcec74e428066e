"""Gold answers as data sets write them (numbers, LaTeX, `#### 42`, solutions with a box), and the
boxes that the judges find in responses.
"""

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import NamedTuple

from megatron_opsft.errors import RowError

_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_LAST_LINE = re.compile(r"####[ \t]*(\S[^\n]*?)\s*\Z")


def read_answer(value: object, field: str) -> str:
    """Return the gold answer in a field's value, as text for the verifier.

    field: the field's name, for errors. Text with boxes gives the last box, with those joined to it
    by "and", "or" or a comma; else what follows `####` on the last line; else the text itself,
    unless the field is a worked `solution`, which must mark its answer. `1,234` becomes `1234`.
    Numbers, also Parquet's decimals, become text without an exponent. A list of one value is that
    value. Errors: `RowError` for anything else: null, booleans, other lists, objects, blank text,
    NaN, a last box that is empty or never closed, and `####` that is followed by more than a line.
    """
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value is None:
        raise RowError(f"no {field}")
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise RowError(
            f"{field} is of type {type(value).__name__}, not text or a number"
            f"{_name_one_of(value, field)}"
        )
    if isinstance(value, float | Decimal):
        if not math.isfinite(value):
            raise RowError(f"{field} is {value}")
        # Of a float, the shortest decimal that is this float.
        number = value if isinstance(value, Decimal) else Decimal(repr(value))
        is_whole = number == int(number)
        return str(int(number)) if is_whole else f"{number:f}".rstrip("0")
    answer = _marked_answer(str(value), field).strip()
    if not answer:
        raise RowError(f"{field} is empty")
    if _THOUSANDS.fullmatch(answer):
        return answer.replace(",", "")
    return answer


def _name_one_of(value: object, field: str) -> str:
    """Say how to name one of the values that a list or an object holds; "" for any other value."""
    if isinstance(value, list) and value:
        return f"; it holds {len(value)} values: name one, such as {field}.0"
    if isinstance(value, Mapping) and value:
        names = ", ".join(map(str, value))
        return f"; it has {names}: name one, such as {field}.{next(iter(value))}"
    return ""


def _marked_answer(text: str, field: str) -> str:
    """Return the answer that a box or `####` marks, or the text itself."""
    if box := last_box(text):
        if not box.content:
            raise RowError(
                f"{field} has a last \\boxed{{ that is empty or never closed"
            )
        return ", ".join(final_boxes(text))
    if match := _LAST_LINE.search(text):
        return match[1]
    if "####" in text:
        raise RowError(f"{field} has no answer behind its last ####, on the last line")
    names = [name for name in field.split(".") if not name.isdecimal()]
    if names[-1:] == ["solution"] and text.strip():
        raise RowError(f"{field} has neither \\boxed{{...}} nor ####")
    return text


_OPENING = re.compile(r"\\\\?(?:boxed|fbox)\s*(?:\{|(?=\d|\\frac))")
_BRACE = re.compile(r"[{}]|\\.", re.DOTALL)  # an escaped brace opens and closes nothing
_BARE_NUMBER = re.compile(r"\\frac\s*(?:\{[^{}]*\}|\d){2}|\d[\d.,]*")

# Text between two boxes of one answer.
_JOIN = re.compile(
    r"(?:[\s,;&$+]|[a-z]+\s+(?:and|or)\b|\\[()\[\],;:! ]|\\q?quad|\b(?:and|or)\b"
    r"|\\text\{[^{}]*\b(?:and|or)\b[^{}]*\}|[A-Za-z](?:_\{?\w+\}?)?\s*=)*"
)


class Box(NamedTuple):
    """One `\\boxed{...}` in a text."""

    start: int
    end: int
    """The end of the command, so that text[start:end] is all of it; -1 if it is never closed."""
    content: str
    """The text inside, stripped."""


def find_boxes(text: str) -> list[Box]:
    """Find the outermost boxes that are not empty, in order; one never closed ends the search."""
    return [box for box in _scan(text) if box.content]


def final_boxes(text: str) -> list[str]:
    """Return the contents of the last box and those joined to it by "and", "or" or a comma."""
    contents: list[str] = []
    next_start = len(text)
    for box in reversed(find_boxes(text)):
        if contents and not _JOIN.fullmatch(text, box.end, next_start):
            break
        if box.content not in contents:
            contents.insert(0, box.content)
        next_start = box.start
    return contents


def last_box(text: str) -> Box | None:
    """Return the last of the outermost boxes; its content is "" if it is empty or never closed."""
    boxes = _scan(text)
    return boxes[-1] if boxes else None


def _scan(text: str) -> list[Box]:
    """Find all outermost boxes; one never closed is the last."""
    boxes: list[Box] = []
    position = 0
    while (match := _OPENING.search(text, position)) is not None:
        start = match.end()
        content = ""
        position = start
        if match[0].endswith("{"):
            end = closing_brace(text, start)
            if end < 0:
                return [*boxes, Box(match.start(), -1, "")]
            content = text[start:end].strip()
            position = end + 1
        elif number := _BARE_NUMBER.match(text, start):
            # \boxed 7: TeX takes one token, people mean the number.
            content = number[0].rstrip(".,")
            position = number.end()
        boxes.append(Box(match.start(), position, content))
    return boxes


def closing_brace(text: str, start: int) -> int:
    """Return the index of the brace that closes the group opened just before `start`; -1 if none
    does.
    """
    depth = 1
    for match in _BRACE.finditer(text, start):
        if match[0] == "{":
            depth += 1
        elif match[0] == "}":
            depth -= 1
        if depth == 0:
            return match.start()
    return -1
