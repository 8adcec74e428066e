"""What an answer says beside its mathematics: option letter, unit, clock time, number base, words.

Pure text; `verify.equality` compares the mathematics of what is left. Whatever is not understood
makes an answer unreadable: it then equals the same text only, never a part of itself.
"""

import re
from dataclasses import dataclass, replace

from megatron_opsft.verify.numerals import read_base, read_clock
from megatron_opsft.verify.spelling import respell
from megatron_opsft.verify.units import FUNCTIONS, letter_as_unit, take_unit

_OPTION = re.compile(
    r"(?:(?:option|choice)\s+)?(?:\\text\{\s*\(?([A-J])\)?\s*[.:)]?\s*\}|\(\s*(?:\\text\{)?([A-J])\}?\s*\)"
    r"(?=\s|$)|([A-J])(?:[.):](?=\s|$)|$))\s*",
    re.IGNORECASE,
)
_SAYS_MORE = re.compile(r"\b(?:is|isn|wrong|incorrect)\b")
_PRODUCT = re.compile("[abckmnpqrtuvwxyz]{2,3}")
_LABEL = re.compile(
    r"\\text\{[^{}\d]*\}\s*(?:=|:(?!\d))\s*"
    r"|(?:\\text\{\s*)?(?:the\s+)?(?:final\s+)?answer\s*(?:is)?\s*[:=]?\s*\}?\s*",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, read as far as text goes.

    text: as respelled; `body`: without option letter, label and unit; `unit`: the words of its
    unit, empty without one; `readable`: whether `body` may be read as mathematics.
    """

    text: str
    option: str
    body: str
    unit: tuple[str, ...]
    readable: bool


def read(text: str) -> Answer:
    """The answer in what a box holds, or in a gold answer."""
    text = respell(text)
    rest = _without_outer_brackets(text)
    if label := _LABEL.match(rest):
        rest = rest[label.end() :]
    option = ""
    match = _OPTION.match(rest)
    if match and not re.match(r"[,;:+*/^_=<>]|-\s", rest[match.end() :]):
        letter = next(filter(None, match.groups()))
        behind = rest[match.end() :]
        if letter.isupper() or not behind:  # (a) 5 may be a product
            option, rest = letter.upper(), behind
    is_whole = is_words(rest) or read_clock(rest) or read_base(rest)
    body, unit, readable = take_unit(rest) if not is_whole else (rest, (), True)
    if option and _SAYS_MORE.search(body):
        readable = False
    return Answer(
        text=text,
        option=option,
        body=_without_outer_brackets(body),
        unit=unit,
        readable=readable,
    )


def _without_outer_brackets(text: str) -> str:
    """Without braces around all of it, and without parentheses around one number."""
    if number := re.fullmatch(r"\(\s*(-?[\d./]+)\s*\)", text):
        return number[1]
    while text.startswith("{") and text.endswith("}"):
        depth = 0
        for position, char in enumerate(text):
            depth += (char == "{") - (char == "}")
            if depth == 0 and position < len(text) - 1:
                return text
        text = text[1:-1].strip()
    return text


def is_words(text: str) -> bool:
    """Whether the text is words and nothing else: a name, yes, a direction, AB."""
    bare = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    return re.fullmatch(r"[^\W\d_]{2,}[.!]?(?:[\s,\-]+[^\W\d_]+[.!]?)*", bare) is not None and not (
        set(bare.lower().split()) & FUNCTIONS
    )


def plain(text: str) -> str:
    """For comparison as text: without wrappers and spaces that mean nothing; words without case."""
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\s*([^\w\s\\]|\\(?=[^a-zA-Z]))\s*", r"\1", " ".join(text.split()))
    text = re.sub(r"([_^])\{(\w)\}", r"\1\2", text)
    return text.casefold() if "\\" not in text and is_words(text) else text


def same_words(left: str, right: str) -> bool:
    """Words by their letters; a product of letters of algebra, such as abc, in any order."""
    if _PRODUCT.fullmatch(left) and _PRODUCT.fullmatch(right):
        return sorted(left) == sorted(right)
    return plain(left) == plain(right)


def with_letter_as_unit(answer: Answer) -> Answer | None:
    """`5 m` with its letter as a unit and not as a variable; None where there is none."""
    found = None if answer.unit else letter_as_unit(answer.body)
    return found and replace(answer, body=found[0], unit=found[1])
