"""Finding `\\boxed{...}` in text: pure string work, shared by the data reader and the verifier."""

import re
from typing import NamedTuple

_OPENING = re.compile(r"\\boxed\s*\{")


class Box(NamedTuple):
    """One `\\boxed{...}`: text[start:end] is all of it, `content` what is inside, stripped."""

    start: int
    end: int
    content: str


def find_boxes(text: str) -> list[Box]:
    """The outermost boxes in order, without empty ones; a box never closed ends the search."""
    boxes: list[Box] = []
    position = 0
    while (match := _OPENING.search(text, position)) is not None:
        closing = _closing_brace(text, match.end())
        if closing < 0:
            break
        position = closing + 1
        content = text[match.end() : closing].strip()
        if content:
            boxes.append(Box(match.start(), position, content))
    return boxes


def _closing_brace(text: str, start: int) -> int:
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
