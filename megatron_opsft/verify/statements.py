"""The words and signs with which a text states a value: a box, an equation, a conclusion."""

import re
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

from megatron_opsft.data.answers import closing_brace

# Counts of characters.
MAX_FRONT = 200  # of the sentence in front of a value
_MAX_BOX = 200
_MAX_ASSUMPTION = 50  # in front of a sign or a verb that are searched for an "if"

FRACTIONS = ("\\frac", "\\dfrac", "\\tfrac")
BOXES = ("\\boxed", "\\fbox")
_OPEN_BOX = re.compile(r"\\(?:boxed|fbox)\{")
_ASCII_EQUATION_SIGNS = ("=", "\\approx", "####", "<answer>")
_EQUATION_SIGNS = (*_ASCII_EQUATION_SIGNS, "≈", "等于", "得", "是", "为")
_NO_EQUATION_SIGNS = ("!=", "<=", ">=", ":=", "不是", "不等于", "是不是")
_VERBS = (
    *(
        "is",
        "are",
        "be",
        "equals",
        "equal to",
        "gives",
        "get",
        "gets",
        "got",
        "find",
        "obtain",
    ),
    *(
        "have",
        "has",
        "makes",
        "becomes",
        "yields",
        "leaves",
        "simplifies to",
        "comes to",
    ),
    *(
        "reduces to",
        "up to",
        "takes",
        "cost",
        "costs",
        "pay",
        "pays",
        "paid",
        "earns",
        "earned",
    ),
    *("spends", "spent", "needs", "total of"),
)
_CHINESE_VERBS = ("共有", "还剩")
_INTRODUCTIONS = (
    *_EQUATION_SIGNS,
    *(f" {verb}" for verb in _VERBS),
    "'s",
    ":",
    *_CHINESE_VERBS,
)
_CONCLUDING_WORDS = ("so", "thus", "hence", "therefore")


def _beginnings(*words: str) -> str:
    """Return the pattern of one of several beginnings of words. That no letter stands in front of
    one is looked at behind it: `re` searches fast for a pattern that starts with characters.
    """
    return "|".join(rf"{word}(?<!\w{word})" for word in words)


def _backwards(words: Iterable[str]) -> str:
    """Return the pattern of one of several words, in a text that is read from its end."""
    return "|".join(word[::-1] for word in words)


_CONCLUDING = (*_CONCLUDING_WORDS, *map(str.capitalize, _CONCLUDING_WORDS))
# The last one is mostly near the end.
_VERB_BACKWARDS = re.compile(
    rf"(?<![a-z])(?:(?:{_backwards((*_VERBS, 'at'))}) |s'|(?:{_backwards(_CONCLUDING)})\b)"
    rf"|(?<=\s):|{_backwards(_CHINESE_VERBS)}"
)
_HEDGES = (
    *(
        " about",
        " approximately",
        " exactly",
        " just",
        " simply",
        " only",
        " now",
        " indeed",
    ),
    *(" him", " her", " them"),
)
_SIGNS = " \t\n*$`\\([{+-−"  # that may stand in front of a number
# In the sentence of a verb: only a conclusion states something, not a given of the problem.
_CONCLUSION = re.compile(
    r"\b(?:so|thus|hence|therefore|then|which|that|gives|gets?|got|obtain|find|makes|becomes"
    r"|equals|yields|leaves|simplifies|answer|solutions?|smallest|largest|greatest|least|total"
    r"|altogether|result|must|half|twice|choose|plus|minus|times|divided|squared"
    r"|of \$?\d[\d,]*)\b"
    r"|\d\s*[-+*/×÷·^]\s*\d|所以|因此|共有|还剩",
    re.IGNORECASE,
)
_CONCLUSION_BEHIND = re.compile(
    r"[^.!?\n=\d]{0,60}\b(?:left|in total|altogether|in all)\b"
)
IS_THE_ANSWER = re.compile(
    r"[*$\\)]*\s(?:is|must be)\s(?:indeed\s)?the\s(?:\w+\s)?(?:answer|result)\b"
)
_FEW_WORDS_TO_THE_END = re.compile(
    r"(?:\s[a-z]+){0,3}[*$\\)\]]*(?:[.;!。\n]|\s*=\s*[a-z]\b|$)"
)
# What ends with a sign or a verb, but states nothing, in small letters: an assumption or a guess
# within a clause, an assumed equation, a denial or a guess before a verb.
_ASSUMPTION = re.compile(
    rf"(?:{_beginnings('if', 'whether', 'suppose', 'maybe', 'perhaps')}|assum(?<!\wassum)\w+)"
    r"\b[^,.;:\n]{0,30}\Z"
)
_ASSUMED_EQUATION = re.compile(
    r"\b(?:let|when|where|for|with|given|at|say|try|set(?:ting)?|using|put|case)\s"
    r"[$\\(\s]*[a-z]\w{0,2}\s*=\Z"
)
_DENIAL = re.compile(
    rf"(?:n't|{_beginnings('not', 'cannot', 'never', 'might', 'may', 'could')})"
    r"\s\w+(?:\s\w+)?\Z"
)
# An equation with an unknown that has a factor, such as 2x = 6 and 2x + 1 = 7, gives no number.
_UNKNOWN_WITH_FACTOR = re.compile(
    r"\d(?<![=\d.\w]\d)\d*[a-z](?:\s*[-+]\s*\d*[a-z]?)?\s*=\Z", re.IGNORECASE
)
_QUESTION = re.compile(r"[^.,;:!?\n。，？]{0,100}[?？]")
_ITEM = re.compile(r"[.)][ *]+\S")
_SENTENCE_BREAK_BACKWARDS = re.compile(r"[\s。！？](?:(?<=[\n。！？])|[.!?])")
_TERM_BREAK = re.compile(
    r"[,，=:：;!?\n≈。；！？$]|\.(?!\d)|\*\*|\\[)\]]|\\(?:implies|approx)"
)


def _by_last_character(endings: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Sort endings by their last characters, so that most words are compared with few of them."""
    sorted_endings: dict[str, list[str]] = {}
    for ending in endings:
        sorted_endings.setdefault(ending[-1], []).append(ending)
    return {last: tuple(found) for last, found in sorted_endings.items()}


_HEDGES_BY_LAST = _by_last_character(_HEDGES)
_INTRODUCTIONS_BY_LAST = _by_last_character(_INTRODUCTIONS)
# The last characters of words behind which a number may be concluded.
_LAST_LETTERS = "".join(word[-1] for word in _CONCLUDING_WORDS)
_MAY_CONCLUDE = frozenset(",:" + _LAST_LETTERS + _LAST_LETTERS.upper())
_MAY_STATE_BY_LAST = _by_last_character(
    (*_HEDGES, *_INTRODUCTIONS, *_CONCLUDING_WORDS, *FRACTIONS, *BOXES)
)
_MAY_END = _MAY_CONCLUDE.union(_MAY_STATE_BY_LAST)
_MAX_ENDING = max(map(len, chain.from_iterable(_MAY_STATE_BY_LAST.values())))


class Statement(NamedTuple):
    """A value that a text states."""

    value: str
    """What the judge is asked for."""
    end: int
    """Where it ends in the text."""


class NumberFront(NamedTuple):
    """The text in front of a number, in two parts that `is_number_stated` judges: `so x = -` is
    `so x =` and ` -`.
    """

    words: str
    """The text up to the signs."""
    signs: str
    """Signs and layout directly in front of the number, such as `= \\(-`, without the `=`."""


def split_front(front: str) -> NumberFront:
    """Return the text in front of a number in two parts."""
    words = front.rstrip(_SIGNS)
    return NumberFront(words, front[len(words) :])


def may_state(text: str, end: int) -> bool:
    """True if the words in front of the number at text[end] end with a box, a fraction, or what may
    state the number. Of any other number only what follows can say that it is the answer. This
    asks less than `is_number_stated`, and costs less: most numbers are part of a calculation.
    """
    words = text[max(0, end - MAX_FRONT) : end].rstrip(_SIGNS)
    if words[-1:] not in _MAY_END:
        return False
    # "so" and the like may be in large letters, with commas behind them.
    ending = words.rstrip(",")[-_MAX_ENDING:].lower()
    return ending.endswith(_MAY_STATE_BY_LAST.get(ending[-1:], ()))


def is_number_stated(front: NumberFront, text: str, end: int) -> bool:
    """True if the number behind `front`, which ends at text[end], is stated: a sign or a verb
    stands directly in front of it, or what follows says that it is the answer.
    """
    words, signs = front
    if signs.endswith(("(", "[", "\\{")) and not signs.endswith(("\\(", "\\[")):
        return False  # the first number of a tuple, or a factor
    if "\n" in signs and _ITEM.match(text, end):
        return False  # the number of a list's item
    last = words[-1:]
    if words.endswith(_HEDGES_BY_LAST.get(last, ())):
        words = words.rpartition(" ")[0].rstrip(_SIGNS)
        last = words[-1:]
    if words.endswith(_INTRODUCTIONS_BY_LAST.get(last, ())):
        return _is_stated_behind(words, text, end)
    if not signs and last.isalnum():
        return False  # the end of a longer number or word
    if last in _MAY_CONCLUDE and words.rstrip(",:")[-9:].lower().endswith(
        _CONCLUDING_WORDS
    ):
        return _FEW_WORDS_TO_THE_END.match(text, end) is not None
    return not words.endswith((".", ",")) and bool(IS_THE_ANSWER.match(text, end))


def _is_stated_behind(words: str, text: str, end: int) -> bool:
    """True if words that end with a sign or a verb state the number that ends at text[end]."""
    sentence = _last_sentence(words)
    if _states_nothing(sentence):
        return False
    if sentence.endswith(_EQUATION_SIGNS):
        return _UNKNOWN_WITH_FACTOR.search(sentence) is None
    return bool(_CONCLUSION.search(sentence) or _CONCLUSION_BEHIND.match(text, end))


def find_introduction(front: str) -> tuple[int, bool]:
    """Return where the last sign or verb of `front` ends, -1 if it has none; and whether it is the
    sign of an equation, which needs no conclusion.
    """
    signs = _ASCII_EQUATION_SIGNS if front.isascii() else _EQUATION_SIGNS
    end = -1
    for sign in signs:
        start = front.rfind(sign)
        if start >= 0:
            end = max(end, start + len(sign))
    if end > 0 and not _TERM_BREAK.search(front, end):
        return end, True
    verb = _VERB_BACKWARDS.search(front[::-1])
    return (len(front) - verb.start() if verb else -1), False


def is_formula_stated(front: str, is_equation: bool) -> bool:
    """True if a formula behind `front`, which ends with a sign or a verb, is stated."""
    sentence = _last_sentence(front)
    if _states_nothing(sentence):
        return False
    return is_equation or _CONCLUSION.search(sentence) is not None


def is_question(text: str, end: int) -> bool:
    """True if the clause that goes on at text[end] ends with a question mark."""
    return _QUESTION.match(text, end) is not None


def find_box(front: str) -> int:
    """Return where the content of the last box of `front` begins; -1 if it has none."""
    start = -1
    if "box" not in front:
        return start
    for box in _OPEN_BOX.finditer(front):
        start = box.end()
    return start


def content_of_box(text: str, start: int, key_end: int) -> Statement | None:
    """Return the content of the box that opens in front of text[start]; None if it is closed in
    front of `key_end`, or too long. The last box of an unfinished text may be open.
    """
    content = text[start : start + _MAX_BOX]
    length = closing_brace(content, 0)
    if length < 0 and len(content) < _MAX_BOX:
        length = len(content.rstrip())
    end = start + length
    return Statement(text[start:end], end) if end >= key_end else None


def _states_nothing(sentence: str) -> bool:
    """True if a sentence that ends with a sign or a verb assumes, guesses or denies."""
    if sentence.endswith(_NO_EQUATION_SIGNS):
        return True
    clause = sentence[-_MAX_ASSUMPTION:].lower()
    if _ASSUMPTION.search(clause):
        return True
    pattern = _ASSUMED_EQUATION if clause.endswith("=") else _DENIAL
    return pattern.search(clause[-30:]) is not None


def _last_sentence(text: str) -> str:
    """Return what follows the last sentence that has ended."""
    # From the end, which is mostly near.
    sentence_break = _SENTENCE_BREAK_BACKWARDS.search(text[::-1])
    if sentence_break is None:
        return text
    return text[len(text) - sentence_break.start() :]
