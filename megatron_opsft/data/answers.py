"""Gold answers as data sets write them (numbers, LaTeX, `#### 42`, solutions with a box), and the
boxes that the judges find in responses.
"""

import math
import re
from decimal import Decimal
from typing import NamedTuple

from megatron_opsft.errors import RowError

_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_LAST_LINE = re.compile(r"####[ \t]*(\S[^\n]*?)\s*\Z")
SOLUTION_FIELD = "solution"


def read_answer(value: object, field: str) -> str:
    """The gold answer in a field's value, as the verifier takes it.

    Text with boxes gives the last box, with those joined to it by "and", "or" or a comma; else
    what follows `####` on the last line; else the text itself, unless the field is a worked
    `solution`, which must mark its answer. `1,234` becomes `1234`. Numbers become text without an
    exponent. Errors: `RowError` for anything else: null, booleans, lists, blank text, NaN, a last
    box that is empty or never closed, and `####` that is followed by more than a line.
    """
    if value is None:
        raise RowError(f"no {field}")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowError(
            f"{field} is of type {type(value).__name__}, not text or a number"
        )
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RowError(f"{field} is {value}")
        number = Decimal(repr(value))
        return str(int(number)) if value.is_integer() else f"{number:f}"
    answer = _marked_answer(str(value), field).strip()
    if not answer:
        raise RowError(f"{field} is empty")
    return answer.replace(",", "") if _THOUSANDS.fullmatch(answer) else answer


def _marked_answer(text: str, field: str) -> str:
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
    if field.rpartition(".")[2] == SOLUTION_FIELD and text.strip():
        raise RowError(f"{field} has neither \\boxed{{...}} nor ####")
    return text


_OPENING = re.compile(r"\\\\?(?:boxed|fbox)\s*(?:\{|(?=\d|\\frac))")
_BRACE = re.compile(r"[{}]|\\.", re.DOTALL)  # an escaped brace opens and closes nothing
_BARE_NUMBER = re.compile(r"\\frac\s*(?:\{[^{}]*\}|\d){2}|\d[\d.,]*")

# What may stand between two boxes of one answer.
_JOIN = re.compile(
    r"(?:[\s,;&$+]|[a-z]+\s+(?:and|or)\b|\\[()\[\],;:! ]|\\q?quad|\b(?:and|or)\b"
    r"|\\text\{[^{}]*\b(?:and|or)\b[^{}]*\}|[A-Za-z](?:_\{?\w+\}?)?\s*=)*"
)


class Box(NamedTuple):
    """One `\\boxed{...}`: text[start:end] is all of it, `content` what is inside, stripped."""

    start: int
    end: int
    content: str


def find_boxes(text: str) -> list[Box]:
    """The outermost boxes in order, without empty ones; a box never closed ends the search."""
    return [box for box in _scan(text) if box.content and box.end >= 0]


def final_boxes(text: str) -> list[str]:
    """Contents of the last box and of those joined to it by "and", "or" or a comma, in order."""
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
    """The last of the outermost boxes; its content is "" where it is empty or never closed."""
    boxes = _scan(text)
    return boxes[-1] if boxes else None


def _scan(text: str) -> list[Box]:
    """All outermost boxes; the last one, if it is never closed, with the end -1."""
    boxes: list[Box] = []
    position = 0
    while (match := _OPENING.search(text, position)) is not None:
        if match[0].endswith("{"):
            end = closing_brace(text, match.end())
            if end < 0:
                return [*boxes, Box(match.start(), -1, "")]
            content, position = text[match.end() : end].strip(), end + 1
        else:  # \boxed 7: TeX takes one token, people mean the number
            number = _BARE_NUMBER.match(text, match.end())
            content = number[0].rstrip(".,") if number else ""
            position = number.end() if number else match.end()
        boxes.append(Box(match.start(), position, content))
    return boxes


def closing_brace(text: str, start: int) -> int:
    """Index of the brace that closes the group opened just before `start`; -1 if none does."""
    depth = 1
    for match in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    return -1
