"""What an answer says beside its mathematics: option letter, condition, unit, words.

Pure text; `verify.equality` compares the mathematics of what is left. Whatever is not understood
makes an answer unreadable: it then equals the same text only, never a part of itself.
"""

import re
from dataclasses import dataclass

from megatron_opsft.data.answers import closing_brace
from megatron_opsft.verify.conditions import split_condition
from megatron_opsft.verify.numerals import (
    read_base,
    read_clock,
    read_duration,
    read_words,
    unwrapped,
)
from megatron_opsft.verify.spelling import respell
from megatron_opsft.verify.units import FUNCTIONS, Unit, singular, take_unit

_MAX_CHARS = 5000
_OPTION_LETTER = (
    r"(?:\\text\{\s*(?:option\s*|choice\s*)?\(?([A-J])\)?\s*[.:)]?\s*\}|\(([A-J])\))"
)
_OPTION_IN_FRONT = re.compile(
    rf"(?:(?:option|choice)\s+)?"
    rf"(?:{_OPTION_LETTER}(?=[\s\d.:\\-]|$)|([A-J])(?:[.):](?=\s|$)|$))[.:]?\s*",
    re.IGNORECASE,
)
_OPTION_BEHIND = re.compile(  # 60 \text{ G} has a unit
    r"(?<=\S)[\s,]+(?:\\text\{\s*(?:option|choice)?\s*\(([A-J])\)\s*\}|\(([A-J])\))$"
)
_GOES_ON = re.compile(r"[,;+*/^_=<>]|-\s")  # behind a letter that is no option
_LOWER_CASE_WORD = re.compile(r"(?<![\\{a-zA-Z])[a-z]{2,}(?![a-zA-Z])")
_SAYS_MORE = re.compile(r"\b(?:is|isn|wrong|incorrect)\b")
_OPTIONS = re.compile(r"\(?[A-J]\)?(?:\s*,?\s*\(?[A-J]\)?)+")
_WORDS = re.compile(
    r"(?:[aA]\s+(?=[^\W\d_]{3}))?[^\W\d_]{2,}[.!]?(?:[\s,\-]+[^\W\d_]+[.!]?)*"
)
_PRODUCT = re.compile("[abckmnpqrtuvwxyz]{2,3}")
_FAMILIES = (
    "abc",
    "kmnpqr",
    "tuvwxyz",
)  # letters that stand together in a product of three
_SHORT_WORDS = {"yes", "no", "odd", "even", "one", "two", "six", "ten", "all", "red"}
# What only introduces an answer.
_INTRODUCTION = re.compile(
    r"\\text\{(?!\(?[A-J][).:])[^{}\d]*(?:\}\s*(?:=|:(?!\d))|(?::|\bis)\s*\})\s*"
    r"|(?:\\text\{\s*)?(?:the\s+)?(?:final\s+)?answer\s*(?:is)?\s*[:=]?\s*\}?\s*|=\s*",
    re.IGNORECASE,
)
# Names in front of a value that math-verify does not read: \max =, P(X>2)=, E[X]=, [ABC]=.
_ARGUMENT = r"[(\[][^()\[\]]*[)\]]"
_NAME = re.compile(
    rf"(\\(?:min|max|det|deg|arg|#)\s*\w?(?:\([^()=]*\))?|P\([^()]*[|<>=\\][^()]*\)"
    rf"|(?:\\mathbb\{{E\}}|E|\\(?:text|operatorname)\s*\{{\w+\}})\s*{_ARGUMENT}"
    r"|\w*[(|][^()|=]*\\c[au]p[^()|=]*[)|]"
    r"|\[[A-Z]{3,}\]|\\frac\{d[a-z]?\}\{d[a-z]\}(?:[a-z](?:\([a-z]\))?)?)\s*=\s*"
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, read as far as text goes."""

    text: str  # as respelled
    body: str  # without option letter, name, condition and unit
    option: str = ""
    unit: Unit = ()
    condition: str = ""
    name: str = ""  # only one that math-verify does not read
    readable: bool = True  # whether `body` may be read as mathematics


def read(text: str) -> Answer:
    """Read what a box holds, or a gold answer; one of more than 5,000 characters is text only."""
    if len(text) > _MAX_CHARS:
        return Answer(text.strip(), text.strip(), readable=False)
    text = _without_outer_brackets(respell(text))
    rest = text
    if match := _INTRODUCTION.match(rest):
        rest = rest[match.end() :]
    rest, condition = split_condition(rest)
    name = ""
    if match := _NAME.match(rest):
        name, rest = match[1], rest[match.end() :]
    rest = _last_of_conversion(rest)
    option, rest = _take_option(rest)
    left, _, right = rest.rpartition("=")
    for part in (rest,) if _LOWER_CASE_WORD.search(left) else (rest, right.strip()):
        if _is_clock_or_numeral(part):  # also t = 5:30
            return Answer(text, part, option, condition=condition, name=name)
    if (number := read_words(rest)) is not None:
        rest = str(number)
    body, unit, readable = (rest, (), True) if is_words(rest) else take_unit(rest)
    if (unit and (":" in body or read_clock(body))) or (
        option and _SAYS_MORE.search(body)
    ):
        readable = False
    return Answer(
        text, _without_outer_brackets(body), option, unit, condition, name, readable
    )


def _last_of_conversion(text: str) -> str:
    """0.6 m of 60 cm = 0.6 m; anything else as it is."""
    first, _, last = text.rpartition("=")
    if "," in text:
        return text
    has_unit = bool(
        re.search(r"\d", first) and re.search(r"\d", last) and take_unit(first)[1]
    )
    return last.strip() if has_unit else text


def _is_clock_or_numeral(text: str) -> bool:
    """Whether it is a clock time, a numeral of a base, or hours with minutes."""
    duration = read_duration(text)
    return bool(read_clock(text) or read_base(text) or (duration and duration[1] > 1))


def _take_option(text: str) -> tuple[str, str]:
    """The option letter before or behind the rest, and the rest."""
    match = _OPTION_IN_FRONT.match(text)
    if match and not _GOES_ON.match(text[match.end() :]):
        letter, behind = next(filter(None, match.groups())), text[match.end() :].strip()
        if letter.isupper() or match[0].startswith(
            r"\text{("
        ):  # (a) 5 may be a product
            return letter.upper(), behind
    match = _OPTION_BEHIND.search(text)
    if match and re.search(r"[\d\\]", text[: match.start()]):
        return match[1] or match[2], text[: match.start()]
    return "", text


def read_options(text: str) -> tuple[str, bool]:
    """Several option letters in order, and whether commas separate them; "" for anything else."""
    bare = unwrapped(text)
    letters = sorted(re.findall("[A-J]", bare)) if _OPTIONS.fullmatch(bare) else []
    return ("".join(letters) if len(set(letters)) == len(letters) else ""), "," in bare


def _without_outer_brackets(text: str) -> str:
    """The text without braces around all of it, and without parentheses around one number."""
    if number := re.fullmatch(r"\(\s*(-?[\d./]+)\s*\)", text):
        return number[1]
    while text.startswith("{") and closing_brace(text, 1) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def is_words(text: str) -> bool:
    """Whether the text is words and nothing else: a name, yes, a direction, AB."""
    bare = unwrapped(text)
    return (
        _WORDS.fullmatch(bare) is not None and not set(bare.lower().split()) & FUNCTIONS
    )


def plain(text: str) -> str:
    """The text for a comparison as text: without wrappers and meaningless spaces, words in lower
    case; two or three letters may be names, whose case says something.
    """
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\s+(?=\\)|(?<=[a-z])\s+(?=\d)", "", text)
    text = re.sub(r"([_^])\{(\w)\}", r"\1\2 ", text)
    text = re.sub(r"\s*([^\w\s\\]|\\(?=[^a-zA-Z]))\s*", r"\1", " ".join(text.split()))
    if "\\" in text or not is_words(text):
        return text
    is_word = (
        len(text) > 3
        or text.lower() in _SHORT_WORDS
        or re.fullmatch("[A-Z]?[a-z]{2}", text)
    )
    return text.casefold() if is_word else text


def is_product(text: str) -> bool:
    """Whether letters may be a product of algebra, such as abc."""
    return _PRODUCT.fullmatch(text) is not None


def may_be_product(text: str) -> bool:
    """Whether a few letters may be a product beside a formula, such as abc and IR."""
    return is_product(text) or re.fullmatch("[A-Z]{2,3}", text) is not None


def same_words(left: str, right: str) -> bool:
    """Whether two texts are the same words, apart from articles; lists may be in any order."""
    if is_product(left) and is_product(right) and sorted(left) == sorted(right):
        is_algebra = len(left) == 2 or any(
            set(left) <= set(family) for family in _FAMILIES
        )
        return left == right or is_algebra
    return _words(left) == _words(right)


def _words(text: str) -> list[str]:
    """The words of each member of a list, in the singular."""
    text = re.sub(r"^there (?:is|are) ", "", plain(text).strip("!."))
    text = re.sub(r"(?<=infinitely many) solutions?$", "", text)
    parts = [part.split() for part in text.split(",")]
    names = [
        [_in_singular(word) for word in part if word not in ("a", "an", "the")]
        for part in parts
    ]
    return sorted(" ".join(words) for words in names)


def _in_singular(word: str) -> str:
    """A word in the singular; letters as they are."""
    return singular(word) if len(word) > 3 else word
