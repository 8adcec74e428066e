"""What an answer says beside its mathematics (option letter, unit, clock time, number base, words),
and the numbers in it.

Pure text; `verify.equality` compares the mathematics of what is left. Whatever is not understood
makes an answer unreadable: it then equals the same text only, never a part of itself.
"""

import re
from dataclasses import dataclass

from megatron_opsft.data.answers import closing_brace
from megatron_opsft.verify.numerals import read_base, read_clock, read_words, unwrapped
from megatron_opsft.verify.spelling import respell
from megatron_opsft.verify.units import FUNCTIONS, singular, take_unit

_LETTER = r"(?:\\text\{\s*(?:option\s*|choice\s*)?\(?([A-J])\)?\s*[.:)]?\s*\}|\(([A-J])\))"
_OPTION = re.compile(
    rf"(?:(?:option|choice)\s+)?(?:{_LETTER}(?=[\s\d.:\\-]|$)|([A-J])(?:[.):](?=\s|$)|$))[.:]?\s*",
    re.IGNORECASE,
)
_OPTION_BEHIND = re.compile(rf"(?<=\S)[\s,]+{_LETTER}$")
_SAYS_MORE = re.compile(r"\b(?:is|isn|wrong|incorrect)\b")
_WORDS = re.compile(r"(?:[aA]\s+(?=[^\W\d_]{3}))?[^\W\d_]{2,}[.!]?(?:[\s,\-]+[^\W\d_]+[.!]?)*")
_PRODUCT = re.compile("[abckmnpqrtuvwxyz]{2,3}")
# n_{\min} =, \max =, f'(2) =: names that math-verify does not read.
_LABEL = re.compile(
    r"\\text\{[^{}\d]*(?:\}\s*(?:=|:(?!\d))|(?::|\bis)\s*\})\s*"
    r"|(?:[a-z]_\{?\\?(?:min|max)\}?|[a-z]'+\(-?\d+\)"
    r"|\\(?:min|max|det|mathbb\{P\}|#)\s*\w?(?:\([^()=]*\))?)\s*=\s*"
    r"|(?:\\text\{\s*)?(?:the\s+)?(?:final\s+)?answer\s*(?:is)?\s*[:=]?\s*\}?\s*",
    re.IGNORECASE,
)
_MAX_CHARS = 5000


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, read as far as text goes.

    text: as respelled; `body`: without option letter, label and unit; `unit`: the words of its
    unit, empty without one; `readable`: whether `body` may be read as mathematics.
    """

    text: str
    body: str
    option: str = ""
    unit: tuple[str, ...] = ()
    readable: bool = True


def read(text: str) -> Answer:
    """Read what a box holds, or a gold answer; one of more than 5,000 characters is text only."""
    if len(text) > _MAX_CHARS:
        return Answer(text.strip(), text.strip(), readable=False)
    text = respell(text)
    rest = _without_outer_brackets(text)
    if label := _LABEL.match(rest):
        rest = rest[label.end() :]
    option, rest = _take_option(rest)
    for part in (rest, rest.rpartition("=")[2].strip()):
        if read_clock(part) or read_base(part):  # also t = 5:30
            return Answer(text, part, option)
    if (number := read_words(rest)) is not None:
        rest = str(number)
    body, unit, readable = (rest, (), True) if is_words(rest) else take_unit(rest)
    if (unit and (":" in body or read_clock(body))) or (option and _SAYS_MORE.search(body)):
        readable = False
    return Answer(text, _without_outer_brackets(body), option, unit, readable)


def _take_option(text: str) -> tuple[str, str]:
    """The option letter before or behind the rest, and the rest."""
    match = _OPTION.match(text)
    if match and not re.match(r"[,;+*/^_=<>]|-\s", text[match.end() :]):
        letter, behind = next(filter(None, match.groups())), text[match.end() :].strip()
        if letter.isupper() or match[0].startswith(r"\text{("):  # (a) 5 may be a product
            return letter.upper(), behind
    match = _OPTION_BEHIND.search(text)
    if match and re.search(r"[\d\\]", text[: match.start()]):
        return match[1] or match[2], text[: match.start()]
    return "", text


def _without_outer_brackets(text: str) -> str:
    """Without braces around all of it, and without parentheses around one number."""
    if number := re.fullmatch(r"\(\s*(-?[\d./]+)\s*\)", text):
        return number[1]
    while text.startswith("{") and closing_brace(text, 1) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def is_words(text: str) -> bool:
    """Whether the text is words and nothing else: a name, yes, a direction, AB."""
    bare = unwrapped(text)
    return _WORDS.fullmatch(bare) is not None and not set(bare.lower().split()) & FUNCTIONS


def plain(text: str) -> str:
    """The text for a comparison as text: without wrappers and meaningless spaces, words in lower
    case.
    """
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\s+(?=\\)|(?<=[a-z])\s+(?=\d)", "", text)
    text = re.sub(r"([_^])\{(\w)\}", r"\1\2 ", text)
    text = re.sub(r"\s*([^\w\s\\]|\\(?=[^a-zA-Z]))\s*", r"\1", " ".join(text.split()))
    return text.casefold() if "\\" not in text and is_words(text) else text


def is_product(text: str) -> bool:
    """Whether letters may be a product of algebra, such as abc."""
    return _PRODUCT.fullmatch(text) is not None


def same_words(left: str, right: str) -> bool:
    """Whether two texts are the same words, apart from articles; lists may be in any order."""
    if is_product(left) and is_product(right):
        return sorted(left) == sorted(right)
    return _words(left) == _words(right)


def _words(text: str) -> list[str]:
    parts = [part.split() for part in plain(text).strip("!").split(",")]
    names = [[singular(word) for word in part if word not in ("a", "an", "the")] for part in parts]
    return sorted(" ".join(words) for words in names)
