"""An answer taken apart: option letter, name, value, unit and condition; and words as answers.

Pure text; `verify.equality` compares the values that are mathematics. Text that is not understood
makes an answer unreadable: it then equals the same text only, never a part of itself.
"""

import re
from typing import NamedTuple

from megatron_opsft.data.answers import closing_brace
from megatron_opsft.verify.conditions import split_condition
from megatron_opsft.verify.layout import matched_group
from megatron_opsft.verify.numerals import (
    read_base,
    read_clock,
    read_duration,
    read_words,
    unwrapped,
)
from megatron_opsft.verify.spelling import respell
from megatron_opsft.verify.units import FUNCTIONS, Quantity, Unit, singular, take_unit

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
# Letters that may be a product of algebra, such as ab; of three letters all are of one family.
_PRODUCT = re.compile("[abckmnpqrtuvwxyz]{2,3}")
_FAMILIES = ("abc", "kmnpqr", "tuvwxyz")
_SHORT_WORDS = {
    "yes",
    "no",
    "odd",
    "even",
    "one",
    "two",
    "six",
    "ten",
    "all",
    "red",
}
# Words in front of an answer: "The answer is", \text{Area: }.
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


class Answer(NamedTuple):
    """One answer, split by its text alone: nothing is parsed as mathematics yet."""

    text: str
    """The whole answer, as `respell` writes it."""
    body: str
    """The value: the text without option letter, name, condition and unit."""
    option: str = ""
    """The letter of the option that it chooses, A to J."""
    unit: Unit = ()
    condition: str = ""
    name: str = ""
    """What the value is of, such as `P(X>2)`; only forms that math-verify cannot read."""
    readable: bool = True
    """True if `body` may be read as mathematics."""


def read(text: str) -> Answer:
    """Split the content of a box, or a gold answer, into its parts.

    A text of more than 5,000 characters stays whole and is not `readable`.
    """
    if len(text) > _MAX_CHARS:
        return Answer(text.strip(), text.strip(), readable=False)
    text = _without_outer_brackets(respell(text))
    body = text
    if match := _INTRODUCTION.match(body):
        body = body[match.end() :]
    body, condition = split_condition(body)
    name = ""
    if match := _NAME.match(body):
        name = match[1]
        body = body[match.end() :]
    option, body = _take_option(_result_of_conversion(body))
    answer = Answer(text, body, option, condition=condition, name=name)
    if clock_or_numeral := _find_clock_or_numeral(body):
        return answer._replace(body=clock_or_numeral)
    if (number := read_words(body)) is not None:
        body = str(number)
    body, unit, readable = Quantity(body) if is_words(body) else take_unit(body)
    if unit and (":" in body or read_clock(body)):
        readable = False
    if option and _SAYS_MORE.search(body):
        readable = False
    body = _without_outer_brackets(body)
    return answer._replace(body=body, unit=unit, readable=readable)


def _result_of_conversion(text: str) -> str:
    """Return 0.6 m of 60 cm = 0.6 m; anything else as it is."""
    if "," in text:
        return text
    before, _, result = text.rpartition("=")
    has_numbers = re.search(r"\d", before) and re.search(r"\d", result)
    return result.strip() if has_numbers and take_unit(before).unit else text


def _find_clock_or_numeral(text: str) -> str:
    """Return the text, or its right side as of t = 5:30, if that is a clock time, a numeral of a
    base, or hours with minutes; "" if it is neither.
    """
    name, _, value = text.rpartition("=")
    value = value.strip()
    duration = read_duration(value)
    is_duration = duration is not None and duration.num_units > 1
    is_read = is_duration or read_clock(value) or read_base(value)
    return value if is_read and not _LOWER_CASE_WORD.search(name) else ""


def _take_option(text: str) -> tuple[str, str]:
    """Return the option letter in front of an answer or behind it, "" for none; and the answer."""
    match = _OPTION_IN_FRONT.match(text)
    if match and not _GOES_ON.match(text[match.end() :]):
        letter = matched_group(match)
        # (a) 5 may be a product.
        if letter.isupper() or match[0].startswith(r"\text{("):
            return letter.upper(), text[match.end() :].strip()
    match = _OPTION_BEHIND.search(text)
    if match and re.search(r"[\d\\]", text[: match.start()]):
        return matched_group(match), text[: match.start()]
    return "", text


def read_options(text: str) -> str:
    """Return several different option letters in alphabetical order; "" for anything else."""
    bare = unwrapped(text)
    if not _OPTIONS.fullmatch(bare):
        return ""
    letters = sorted(re.findall("[A-J]", bare))
    return "".join(letters) if len(set(letters)) == len(letters) else ""


def _without_outer_brackets(text: str) -> str:
    """Remove braces around all of the text, and parentheses around one number."""
    if number := re.fullmatch(r"\(\s*(-?[\d./]+)\s*\)", text):
        return number[1]
    while text.startswith("{") and closing_brace(text, 1) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def is_words(text: str) -> bool:
    """True for words and nothing else: a name, yes, a direction, AB."""
    bare = unwrapped(text)
    return _WORDS.fullmatch(bare) is not None and FUNCTIONS.isdisjoint(
        bare.lower().split()
    )


def normalize_text(text: str) -> str:
    """Return the text for a comparison as text: without wrappers and meaningless spaces, words in
    lower case. Two or three letters may be names, whose case says something.
    """
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    # No spaces in front of a command or a number: x \pi, \sin 2.
    text = re.sub(r"\s+(?=\\)|(?<=[a-z])\s+(?=\d)", "", text)
    text = re.sub(r"([_^])\{(\w)\}", r"\1\2 ", text)  # x^{2}
    # One space between words, none around signs.
    text = re.sub(r"\s*([^\w\s\\]|\\(?=[^a-zA-Z]))\s*", r"\1", " ".join(text.split()))
    if "\\" in text or not is_words(text):
        return text
    # Such as Yes, Bob and ab, but not AB, Bo or ABC.
    is_short_word = text.lower() in _SHORT_WORDS or re.fullmatch("[A-Z]?[a-z]{2}", text)
    return text.casefold() if len(text) > 3 or is_short_word else text


def may_be_product(text: str) -> bool:
    """True for letters that may be a product if the other side is a formula, such as abc and IR."""
    return bool(_PRODUCT.fullmatch(text) or re.fullmatch("[A-Z]{2,3}", text))


def same_words(gold: str, answer: str) -> bool:
    """True if two texts are the same words, apart from articles; lists may be in any order. Letters
    that may be a product, too: ab is ba.
    """
    of_one_family = any(set(gold) <= set(family) for family in _FAMILIES)
    may_be_turned = len(gold) == 2 or of_one_family
    if may_be_turned and _PRODUCT.fullmatch(gold) and sorted(gold) == sorted(answer):
        return True
    return _list_of_words(gold) == _list_of_words(answer)


def _list_of_words(text: str) -> list[str]:
    """Return the members of a list in alphabetical order, their words in the singular, without
    articles.
    """
    text = re.sub(r"^there (?:is|are) ", "", normalize_text(text).strip("!."))
    text = re.sub(r"(?<=infinitely many) solutions?$", "", text)
    members = []
    for member in text.split(","):
        words = [word for word in member.split() if word not in ("a", "an", "the")]
        members.append(" ".join(map(_in_singular, words)))
    return sorted(members)


def _in_singular(word: str) -> str:
    """Return a word in the singular; letters as they are."""
    return singular(word) if len(word) > 3 else word
