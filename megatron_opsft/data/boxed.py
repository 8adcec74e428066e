"""Finding `\\boxed{...}` and `\\fbox{...}` in text: shared by the data reader and the verifier."""

import re
from typing import NamedTuple

_OPENING = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?=\d|\\frac))")
_BARE_NUMBER = re.compile(r"\\frac\s*(?:\{[^{}]*\}|\d){2}|\d[\d.,]*")

# What may stand between two boxes of one answer.
_JOIN = re.compile(
    r"(?:[\s,;&$]|[a-z]+\s+(?:and|or)\b|\\[()\[\],;:! ]|\\q?quad|\b(?:and|or)\b"
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
    """The last of the outermost boxes; without content where it is empty or never closed: what it
    was to hold is not known.
    """
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
    position = start
    while position < len(text):
        char = text[position]
        if char == "\\":
            position += 1  # an escaped brace opens and closes nothing
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return -1
