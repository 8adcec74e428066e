r"""The places at which a response states the right answer, in its thinking and behind it.

A statement is the right side of an equation, the content of a box, what stands behind `####`, or
what a sentence concludes: "so the total is 12", "she has 12 left", "12 is the answer". A question
("is it 12?"), an assumption ("if x = 12") and an inequality state nothing, nor does a part of a
longer term: 12 in 12.5, 12x, 12 + 5. The judge of mathematics decides whether a statement is right;
it is asked only for texts with the numbers and letters of the gold answer, or of the answer that
the response ends with: 28/6 is not found for 14/3 unless the response ends with it.

What stays wrong: plain sentences ("The remainder is 1."), number words ("three"), and other forms
of a formula (1024 for 2^{10}) are not found; a given of the problem that is written as an equation
("r = 3") or behind "so" counts; so does the first of several results ("x = 3 or x = 5").
"""

import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from megatron_opsft.verify.statements import (
    BOXES,
    FRACTIONS,
    IS_THE_ANSWER,
    MAX_FRONT,
    Statement,
    content_of_box,
    find_box,
    find_introduction,
    is_formula_stated,
    is_number_stated,
    is_question,
    may_state,
    split_front,
)

_MAX_ASKED = 16  # different texts that the judge is asked for

# Numbers, and what stands around them.
_NUMBER = re.compile(
    r"(?P<sign>[+-]?)\s*\\?\$?\s*"
    r"(?P<top>\d{1,100}(?:(?:,|\{,\})\d{3}){0,30}(?:\.\d{1,100})?|\.\d{1,100})"
    r"(?:\s*/\s*(?P<bottom>\d{1,100}))?"
    r"|(?P<minus>-?)\\[dt]?frac\s*(?:\{(?P<over>-?\d{1,100})\}|(?P<o>\d))"
    r"\s*(?:\{(?P<under>\d{1,100})\}|(?P<u>\d))"
)
_MIXED_NUMBER = re.compile(
    r"(\d{1,100})\s*\\[dt]?frac\s*\{(\d{1,100})\}\s*\{(\d{1,100})\}"
)
_PERCENT_OR_DEGREES = re.compile(r"\s?(?:\\?%|°|\^\{?\\circ\}?)")
# What follows the digits, or the numerator, of a number that is the answer.
_THE_ANSWER = re.compile(
    rf"(?:\s*/\s*\d{{1,100}})?(?:{_PERCENT_OR_DEGREES.pattern})?{IS_THE_ANSWER.pattern}"
)
_UNIT = re.compile(
    r"(?:\s*(?:\\?%|°|\^\{?\\circ\}?|\\(?:text|mbox|mathrm)\{[^{}]*\}(?:\^\{?\d\}?)?)"
    r"|\s+(?!pi\b|sqrt|or\b|and\b)[a-z]{2,})*\.?"
)
_NAME = re.compile(r"(?:[A-Za-z]|\\[a-z]+)\s*=\s*")
_LONGER_TERM = re.compile(
    r"\s*(?:[+×÷·^_√π]|\*(?!\*)|/\s*[\d(\\]|[-−]\s*(?:[\d(\\]|[a-z]\b)|!\s*[-+=*/\\×]"
    r"|\\(?:cdot|times|div|pm|sqrt|[dt]?frac|pi|sin|cos|tan|log|ln|left|theta|infty|binom|p?mod)"
    r"|(?:mod|times|plus|minus|divided|choose|hundred|thousand|million|billion)\b)"
    r"|\(|\{,|:\d|\s\d+/\d|a(?![A-Za-z])|\s?[b-fh-knp-rt-zA-Z](?![A-Za-z])"
)

# Formulas.
_OPENING = re.compile(
    r"(?:[\s*`:]|\$|\\[(\[]|\\(?:text|math[a-z]+)\{|(?:option|choice)\s)*"
)
_CLOSING = (
    r"[;!?\n≈。；！？$]|\.(?!\d)|\*\*|\\[)\]]|\\(?:implies|approx)"
    r"|\s(?:which|so|and|because|since|but|as|where|when|if|then|by|from|in total|left)\b"
)
_END = re.compile(rf"[,，=:：]|{_CLOSING}")
_END_OF_LIST = re.compile(_CLOSING)
_SLASH = re.compile(r"(\\?\w+)\s*/\s*(\\?\w+)")
_LAST_WORDS = re.compile(r"(?:\s+(?!pi\b|sqrt)[a-z]{2,})+\Z")
_ATOM = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]+|[√∞°−-]")
_LAYOUT = frozenset(
    (
        *("frac", "dfrac", "tfrac", "left", "right", "text", "mathrm", "mathbf"),
        *("cdot", "times", "quad", "displaystyle"),
    )
)
_SAME_ATOM = {"π": "pi", "θ": "theta", "√": "sqrt", "∞": "infty", "°": "circ", "−": "-"}


class _Target(NamedTuple):
    """What a right answer must look like before the judge is asked."""

    key: re.Pattern[str]
    """A part of it, by which it is found in a text."""
    number: Fraction | None
    """Its value, if it is a plain number, with or without a unit."""
    atoms: tuple[str, ...]
    """Its numbers, names, letters and minus signs, sorted; empty for a plain number."""
    others: tuple[str, ...]
    """Atoms beside the key that have one spelling: texts around the key without them are none."""
    has_digits: bool
    """True if an atom is a number."""
    end: re.Pattern[str]
    """Where the text of such an answer ends."""
    reach: int
    """Characters in front of the key that are searched for what introduces a formula, and behind
    it for its end.
    """


def find_right_answers(
    text: str, answers: Iterable[str], is_right: Callable[[str], bool]
) -> list[int]:
    """Return where each statement of the right answer ends in `text`, in order, in characters.

    answers: right answers as texts, such as the gold and the one that the response ends with.
    is_right: the judge; it is asked once for each different text.
    """
    ends: set[int] = set()
    for target in dict.fromkeys(chain.from_iterable(map(_targets, answers))):
        judged: dict[str, bool] = {}
        find_statement = _state_formula if target.number is None else _state_number
        for key in target.key.finditer(text):
            statement = find_statement(text, *key.span(), target)
            if statement is None or statement.end in ends:
                continue
            if statement.value not in judged:
                if len(judged) == _MAX_ASKED:
                    continue
                judged[statement.value] = is_right(statement.value)
            if judged[statement.value]:
                ends.add(statement.end)
    return sorted(ends)


@lru_cache(maxsize=4096)
def _targets(answer: str) -> tuple[_Target, ...]:
    """Return what statements of this answer look like: of a mixed number two, 2 1/2 and 5/2."""
    mixed = _MIXED_NUMBER.fullmatch(answer.strip())
    if mixed is None:
        return (_target(answer.strip()),)
    whole, over, under = map(int, mixed.groups())
    return _target(answer.strip()), _target(f"{whole * under + over}/{under}")


def _target(answer: str) -> _Target:
    """Return what a statement of this answer looks like."""
    if name := _NAME.match(answer):
        answer = answer[name.end() :]
    match = _NUMBER.match(answer)
    number = None
    if match and _UNIT.fullmatch(answer, match.end()):
        number = _value_of(match)
    if number is not None:
        return _Target(
            key=_number_pattern(number, answer),
            number=number,
            atoms=(),
            others=(),
            has_digits=True,
            end=_END,
            reach=0,
        )
    atoms = _atoms(answer)
    # The longest part is the rarest in a text.
    longest = max(atoms, key=lambda atom: (len(atom), atom != "-"), default=answer)
    letter = r"\d" if longest[:1].isdecimal() else r"[^\W\d_]"
    key = rf"{re.escape(longest)}(?<!{letter}{re.escape(longest)})(?!{letter})"
    for sign, name_of_sign in _SAME_ATOM.items():
        if name_of_sign == longest:
            key = rf"{key}|{sign}"
    has_list = any(sign in answer for sign in ",:=")
    end = _END_OF_LIST if has_list else _END
    respelled = {longest, *_SAME_ATOM.values()}
    others = dict.fromkeys(atom for atom in atoms if atom not in respelled)
    return _Target(
        key=re.compile(key),
        number=None,
        atoms=atoms,
        others=tuple(others),
        has_digits=any(atom[:1].isdecimal() for atom in atoms),
        end=end,
        reach=min(MAX_FRONT, 30 + 3 * len(answer)),
    )


def _value_of(match: re.Match[str]) -> Fraction | None:
    """Return the value of a match of `_NUMBER`; None if it divides by zero."""
    sign, top, bottom, minus, over, o, under, u = match.groups()
    value = _quotient(top or over or o, bottom or under or u or "1")
    return -value if value and (sign == "-" or minus == "-") else value


@lru_cache(maxsize=4096)
def _quotient(top: str, bottom: str) -> Fraction | None:
    """Return the quotient of two numbers as they are written; None if it divides by zero."""
    if int(bottom) == 0:
        return None
    return Fraction(re.sub(r"[,{}]", "", top)) / int(bottom)


def _number_pattern(number: Fraction, answer: str) -> re.Pattern[str]:
    """Return the pattern of a number's digits as people write them: 1234 and 1,234, 37.5 and 37.50,
    0.5 and 1/2.
    """
    size = abs(number)
    with_commas = f"{size.numerator:,}"
    whole = {str(size.numerator), with_commas, with_commas.replace(",", "{,}")}
    # No digit stands in front. That is looked at behind the first characters, because `re` searches
    # fast for a pattern that starts with a character.
    spellings = {_unless_behind_a_digit(number) for number in whole}
    decimals = set(re.findall(r"\d*\.\d+", answer))
    if size.denominator > 1:
        decimal = f"{float(size):.12g}"
        decimals |= {decimal, decimal.removeprefix("0")}
    spellings.update(_unless_behind_a_digit(decimal) + "0*" for decimal in decimals)
    if size < 1:
        spellings.add(_unless_behind_a_digit(f"{float(100 * size):.12g}"))
    alternatives = "|".join(sorted(spellings, key=len, reverse=True))
    pattern = rf"(?:{alternatives})(?!\d|[.,]\d)"
    if 1 < size.denominator < 10 and size.numerator < 10:  # as in \frac12
        pattern += rf"|(?<=frac){size.numerator}{size.denominator}"
    return re.compile(pattern)


def _unless_behind_a_digit(number: str) -> str:
    """Return the pattern of a number's digits that are not the end of a longer number."""
    digits = re.escape(number)
    return rf"{digits}(?<!\d{digits})"


@lru_cache(maxsize=4096)
def _atoms(text: str) -> tuple[str, ...]:
    """Return the numbers, letters, names and minus signs of a text, sorted, without the names of
    LaTeX's layout.
    """
    atoms = (_SAME_ATOM.get(atom, atom) for atom in _ATOM.findall(text))
    return tuple(sorted(atom for atom in atoms if atom not in _LAYOUT))


def _state_number(text: str, start: int, end: int, target: _Target) -> Statement | None:
    """Return the statement of the number whose digits are text[start:end]; None if the text does
    not state it there, or if it is another number.
    """
    if not may_state(text, start) and not _THE_ANSWER.match(text, end):
        return None
    front = split_front(text[max(0, start - MAX_FRONT) : start])
    if front.words.endswith(FRACTIONS):
        before, backslash, _ = front.words.rpartition("\\")
        start -= len(front.words) + len(front.signs) - len(before)
        front = split_front(before)
    if front.words.endswith(BOXES):
        return content_of_box(text, start - len(front.signs) + 1, end)
    match = _NUMBER.match(text, start)
    if match is None:
        return None
    percent_or_degrees = _PERCENT_OR_DEGREES.match(text, match.end())
    value_end = (percent_or_degrees or match).end()
    if _LONGER_TERM.match(text, value_end) or not is_number_stated(
        front, text, value_end
    ):
        return None
    number = _value_of(match)
    if number is None or target.number is None:
        return None
    is_negative = "-" in front.signs.rpartition("\n- ")[2] or "−" in front.signs
    if is_negative:
        number = -number
    is_percentage = percent_or_degrees is not None and "%" in percent_or_degrees[0]
    if number != target.number and not (
        is_percentage and number == 100 * target.number
    ):
        return None
    if is_question(text, value_end):
        return None
    sign = "-" if is_negative else ""
    return Statement(sign + text[start:value_end], value_end)


def _state_formula(
    text: str, start: int, end: int, target: _Target
) -> Statement | None:
    """Return the statement around text[start:end], a part of the answer; None if no box is around
    it, nothing introduces it, or it differs from the answer in its numbers and letters.
    """
    front_start = max(0, start - target.reach)
    front = text[front_start:start]
    if not target.has_digits and front.rstrip("\\ ")[-1:].isdecimal():
        return None  # a factor: 2\pi is not \pi
    if target.others:
        around = text[front_start : end + MAX_FRONT]
        if not all(atom in around for atom in target.others):
            return None
    box_start = find_box(front)
    if box_start > 0:
        boxed = content_of_box(text, front_start + box_start, end)
        if boxed is not None:
            return _as_asked(boxed.value, boxed.end, target)
    introduction_end, is_equation = find_introduction(front)
    if introduction_end <= 0:
        return None
    introduction_end += front_start
    opening = _OPENING.match(text, introduction_end, start)
    value_start = opening.end() if opening else introduction_end
    value_limit = min(len(text), end + target.reach)
    closing_sign = target.end.search(text, value_start, value_limit)
    value_end = closing_sign.start() if closing_sign else value_limit
    if value_end < end:
        return None
    statement = _as_asked(text[value_start:value_end], value_end, target)
    if statement is None or is_question(text, value_end):
        return None
    far_front = text[max(0, start - MAX_FRONT) : introduction_end]
    if not is_formula_stated(far_front, is_equation):
        return None
    return statement


def _as_asked(value: str, end: int, target: _Target) -> Statement | None:
    """Return the statement of a formula, without the words that follow it; None if its numbers and
    letters are not those of the answer. In LaTeX the text is mostly that of the gold answer, and
    need not be read as mathematics.
    """
    shorter = value.rstrip()
    if shorter.endswith("}") and shorter.count("}") > shorter.count("{"):
        shorter = shorter[:-1].rstrip()
    end += len(shorter) - len(value)
    if _atoms(shorter) != target.atoms:
        if "=" not in shorter and not shorter[-1:].isalpha():
            return None
        name = _NAME.match(shorter)
        without_name = shorter[name.end() :] if name else shorter
        shorter = _LAST_WORDS.sub("", without_name)
        end -= len(without_name) - len(shorter)
        if _atoms(shorter) != target.atoms:
            return None
    num_opened = shorter.count("(") + shorter.count("[")
    if num_opened != shorter.count(")") + shorter.count("]"):
        return None
    if "/" in shorter:
        shorter = _SLASH.sub(r"\\frac{\1}{\2}", shorter)
    return Statement(shorter.replace("*", ""), end)
