"""The places at which a response states the right answer, in its thinking and behind it.

A statement is the right side of an equation, the content of a box, or what a sentence concludes:
"so the total is 12", "the answer is 12". A question ("is it 12?") states nothing. The judge of
mathematics decides whether a statement is right, but it is asked only for texts that have the
numbers and letters of the gold answer, or of the answer that the response ends with: 28/6 is not
found for 14/3 unless the response ends with it.
"""

import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from megatron_opsft.data.answers import closing_brace

_MAX_FRONT = (
    200  # characters in front of a value that are searched for what introduces it
)
_MAX_VALUE = 200  # characters of a value
_BOX = "boxed{"
_EQUATION_SIGNS = ("=", "≈", "\\approx", "等于", "得", "是", "为")
_VERBS = (
    *(
        " is",
        " are",
        "'s",
        " be",
        " equals",
        " gives",
        " get",
        " got",
        " gets",
        " find",
    ),
    *(" obtain", " have", " has", " makes", " becomes", ":"),
)
_INTRODUCTIONS = (*_EQUATION_SIGNS, *_VERBS)
_SIGNS = " \t\n*$`\\([{+-"  # that may stand in front of a number
_FRACTIONS = ("\\frac", "\\dfrac", "\\tfrac")
_HEDGES = (
    " about",
    " approximately",
    " exactly",
    " just",
    " simply",
    " only",
    " equal to",
)
_CONCLUSION = re.compile(
    r"\b(?:so|thus|hence|therefore|then|which|that|gives|gets?|got|obtain|find|makes|becomes"
    r"|equals|answer|total|altogether|result|plus|minus|times|divided|squared)\b"
    r"|\d\s*[-+*/×÷·^]\s*\d",
    re.IGNORECASE,
)
_SENTENCE_BREAK = re.compile(r"[.!?]\s|[\n。！？]")
_OPENING = re.compile(r"(?:[\s*`:]|\$|\\[(\[]|\\(?:text|math[a-z]+)\{)*")
_CLOSING = (
    r"[;!?\n≈。；！？$]|\.(?!\d)|\*\*|\\[)\]]|\\(?:implies|approx)"
    r"|\s(?:which|so|and|because|since|but|as|where|when|if|then|by|from|in total|left)\b"
)
_END = re.compile(rf"[,，=:：]|{_CLOSING}")
_END_OF_LIST = re.compile(_CLOSING)
_NUMBER = re.compile(
    r"(?P<sign>[+-]?)\s*\\?\$?\s*(?P<top>\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s*/\s*(?P<bottom>\d+))?"
    r"|(?P<minus>-?)\\[dt]?frac\s*(?:\{(?P<over>\d+)\}|(?P<o>\d))\s*(?:\{(?P<under>\d+)\}|(?P<u>\d))"
)
_SLASH = re.compile(r"(\\?\w+)\s*/\s*(\\?\w+)")
_PLAIN_WORDS = re.compile(r"(?:\s+[a-z]{2,}){1,5}\s*")
_ATOM = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]+|[√∞°]")
_LAYOUT = frozenset(
    (
        *(
            "frac",
            "dfrac",
            "tfrac",
            "left",
            "right",
            "text",
            "mathrm",
            "mathbf",
            "cdot",
        ),
        *("times", "quad", "displaystyle"),
    )
)
_SAME_ATOM = {"π": "pi", "θ": "theta", "√": "sqrt", "∞": "infty", "°": "circ"}


class _Target(NamedTuple):
    """What a right answer must look like before the judge is asked."""

    key: re.Pattern[str]
    """A part of it, by which it is found in a text."""
    number: Fraction | None
    """Its value, if it is a plain number."""
    atoms: tuple[str, ...]
    """Its numbers, names and letters, sorted."""
    end: re.Pattern[str]
    """Where the text of such an answer ends."""


def find_right_answers(
    text: str, answers: Iterable[str], is_right: Callable[[str], bool]
) -> list[int]:
    """Return where each statement of the right answer ends in `text`, in order, in characters.

    answers: right answers as texts, such as the gold and the one that the response ends with.
    is_right: the judge; it is asked once for each different text.
    """
    ends: set[int] = set()
    for target in dict.fromkeys(map(_target, answers)):
        judged: dict[str, bool] = {}
        for key in target.key.finditer(text):
            statement = _statement_around(text, key.start(), key.end(), target)
            if statement is None:
                continue
            value, end = statement
            if value not in judged:
                candidates = _candidates(target, value)
                judged[value] = any(map(is_right, candidates))
            if judged[value]:
                ends.add(end)
    return sorted(ends)


@lru_cache(maxsize=4096)
def _target(answer: str) -> _Target:
    """Return what a statement of this answer looks like."""
    has_list = any(sign in answer for sign in ",:=")
    match = _NUMBER.fullmatch(answer.strip().removesuffix("."))
    number = _value_of(match) if match else None
    atoms = _atoms(answer)
    if number is not None:
        key = _number_pattern(number, answer)
    else:
        # The longest part is the rarest in a text.
        longest = max(atoms, key=len, default=answer)
        letter = r"\d" if longest[:1].isdecimal() else r"[^\W\d_]"
        key = rf"{re.escape(longest)}(?<!{letter}{re.escape(longest)})(?!{letter})"
        for sign, name in _SAME_ATOM.items():
            if name == longest:
                key = rf"{key}|{sign}"
    end = _END_OF_LIST if has_list and number is None else _END
    return _Target(re.compile(key), number, atoms, end)


def _value_of(match: re.Match[str]) -> Fraction | None:
    """Return the value of a match of `_NUMBER`; None if it divides by zero."""
    top = match["top"] or match["over"] or match["o"]
    bottom = match["bottom"] or match["under"] or match["u"] or "1"
    if int(bottom) == 0:
        return None
    value = Fraction(top.replace(",", "")) / int(bottom)
    return -value if "-" in (match["sign"], match["minus"]) else value


def _number_pattern(number: Fraction, answer: str) -> str:
    """Return the pattern of a number's digits as people write them: 1234 and 1,234, 37.5 and 37.50,
    0.5 and 1/2.
    """
    size = abs(number)
    spellings = {str(size.numerator), f"{size.numerator:,}"}
    spellings.update(re.findall(r"\d*\.\d+", answer))
    if size.denominator > 1:
        spellings.add(f"{float(size):.12g}".removeprefix("0"))
    if number < 1:
        spellings.add(f"{float(100 * size):.12g}")
    alternatives = "|".join(map(re.escape, sorted(spellings, key=len, reverse=True)))
    return rf"(?:{alternatives})(?!\d|[.,]\d)"


def _atoms(text: str) -> tuple[str, ...]:
    """Return the numbers, names and letters of a text, sorted, without those of LaTeX's layout."""
    atoms = (_SAME_ATOM.get(atom, atom) for atom in _ATOM.findall(text))
    return tuple(sorted(atom for atom in atoms if atom not in _LAYOUT))


def _statement_around(
    text: str, start: int, end: int, target: _Target
) -> tuple[str, int] | None:
    """Return the value that the text states around text[start:end], and where it ends; None if no
    box is around it, and nothing introduces it.
    """
    front_start = max(0, start - _MAX_FRONT)
    front = text[front_start:start]
    find_introduction = (
        _introduction_of_formula if target.number is None else _introduction_of_number
    )
    introduction = find_introduction(front)
    if introduction is None:
        return None
    value_start = front_start + len(introduction)
    if introduction.endswith(_BOX):
        content = text[value_start : value_start + _MAX_VALUE]
        value_end = value_start + closing_brace(content, 0)
        return (text[value_start:value_end], value_end) if value_end >= end else None
    is_equation = introduction.endswith(_EQUATION_SIGNS)
    if not is_equation and not _CONCLUSION.search(_last_sentence(introduction)):
        return None
    if opening := _OPENING.match(text, value_start, start):
        value_start = opening.end()
    closing_sign = target.end.search(text, value_start)
    value_end = closing_sign.start() if closing_sign else len(text)
    is_question = text.startswith(("?", "？"), value_end)
    if is_question or value_end < end or value_end - value_start > _MAX_VALUE:
        return None
    value = text[value_start:value_end].rstrip()
    value_end = value_start + len(value)
    if value.endswith("}") and value.count("}") > value.count("{"):
        value = value[:-1].rstrip()
    return value, value_end


def _introduction_of_number(front: str) -> str | None:
    """Return the text up to what introduces the number behind `front`; None if nothing does.

    Only signs and words such as "about" may stand between the two.
    """
    bare = front.rstrip(_SIGNS)
    if bare.endswith(_FRACTIONS):
        bare = bare.rpartition("\\")[0].rstrip(_SIGNS)
    if bare.endswith(_BOX[:-1]):
        return bare + "{"
    if bare.endswith(_HEDGES):
        bare = bare.rpartition(" ")[0].rstrip(_SIGNS)
    return bare if bare.endswith(_INTRODUCTIONS) else None


def _introduction_of_formula(front: str) -> str | None:
    """Return the text up to the last box, equation sign or verb of `front`; None if it has none."""
    box, equation = _end_of_last(front, (_BOX,)), _end_of_last(front, _EQUATION_SIGNS)
    end = max(box, equation)
    if end < 0 or (equation > box and _END.search(front, equation)):
        end = _end_of_last(front, _VERBS)
    return front[:end] if end > 0 else None


def _end_of_last(text: str, parts: Iterable[str]) -> int:
    """Return where the last of these parts ends in the text; -1 if it has none of them."""
    return max(text.rfind(part) + len(part) if part in text else -1 for part in parts)


def _last_sentence(text: str) -> str:
    """Return what follows the last sentence that has ended."""
    return _SENTENCE_BREAK.split(text)[-1]


def _candidates(target: _Target, value: str) -> list[str]:
    """Return what the judge is asked for a stated value: nothing if it cannot be right; a number
    with words behind it (9 positive divisors) also without them.
    """
    if target.number is None:
        # In LaTeX the text is mostly that of the gold, and need not be read as mathematics.
        in_latex = _SLASH.sub(r"\\frac{\1}{\2}", value).replace("*", "")
        return [in_latex] if _atoms(value) == target.atoms else []
    match = _NUMBER.match(value)
    if match is None:
        return []
    number = _value_of(match)
    behind = value[match.end() :]
    is_percentage = "%" in behind
    if number != target.number and not (
        is_percentage and number == 100 * target.number
    ):
        return []
    if not any(character.isdigit() for character in behind):
        if _PLAIN_WORDS.fullmatch(behind):
            return [value, match[0]]
        return [value]
    return []
