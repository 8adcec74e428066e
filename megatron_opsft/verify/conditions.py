"""Conditions behind an answer: `for all x`, `when n >= 1`, `(x > 0)`, `only`.

They are kept apart from the answer, and compared where both sides have one. Reasons (`since x > 0`)
are dropped. Text with several cases is left whole.
"""

import re

from megatron_opsft.verify.equality import same_text_value

# A word that begins a condition, perhaps inside `\text` or parentheses, behind something else.
_OPENING = r"(?<=[^\s,;(])(?:[\s,;(]|\\text\s*\{)*"
_REASON_WORDS = "since|because|as|rejecting|discarding|excluding|is the only"
_CONDITION_WORDS = (
    "for|when|where|if|whenever|with|provided|given|such that|assuming|only"
    "|attained|achieved|reached"
)
_BEGINNING = re.compile(
    rf"{_OPENING}(?:\\forall|(?<![a-zA-Z\\])(?:({_REASON_WORDS})|{_CONDITION_WORDS})(?![a-zA-Z]))"
)
_ONLY_IN_FRONT = re.compile(
    r"(?:\\text\s*\{\s*only\s*\}|only(?![a-zA-Z]))\s*(?=\S)", re.IGNORECASE
)
_QUANTIFIER_IN_FRONT = re.compile(
    r"(?:(?:\\text\s*\{\s*)?for (?:all|every|each|any)(?![a-zA-Z])|\\forall)([^,:]*)[,:]\s*(?=\S)",
    re.I,
)
_LETTERS = r"[a-zA-Z](?:_\{?\w\}?)?(?:\s*,\s*[a-zA-Z])*"
_SIGN = r"(?:<|>|\\(?:le|ge|ne|in)(?![a-zA-Z]))"
_MEMBERSHIP = re.compile(
    rf"(?<=[^\s,;(])[\s,;(]+{_LETTERS}\s*\\in\s*\\mathbb\s*\{{?[A-Z]\}}?[^,;]*$"
)
_IN_PARENTHESES = re.compile(
    rf"(?<=[^\s,;(])\s+\((?:[^()=]*{_SIGN}[^()]*|\s*[a-zA-Z]\s*=[^()=]+)\)$"
)
_BOUND_BEHIND_COMMA = re.compile(
    rf"\s*[,;]\s*(?P<letter>[a-zA-Z])\s*{_SIGN}\s*[^,;<>=]+$"
)
_CASES = re.compile(
    r"(?<![a-zA-Z\\])(?:otherwise|else|or|wrong|incorrect|unless|then"
    r"|(?:if|for|when)\b.*\b(?:if|for|when))"
    r"(?![a-zA-Z])",
    re.IGNORECASE,
)
_QUANTIFIER = re.compile(
    r"\\forall|(?<![a-zA-Z])(?:all|any|every|each|some|only|is|are|constants?|arbitrary"
    r"|real|integers?)(?![a-zA-Z])"
)
_RELATION = re.compile(rf"{_SIGN}|=")
_SET = re.compile(r"\\in(?![a-zA-Z])\s*(\\mathbb\s*\{?([A-Z])\}?\S*)")
_POSITIVE = re.compile(r"\^\s*\{?\+|>|\^\s*\{?\*|\\ge")  # marks of Z that leave N
_SET_WORDS = {
    "positive integer": "N",
    "natural": "N",
    "integer": "Z",
    "rational": "Q",
    "real": "R",
}
_WORD = re.compile(r"(?<![\\a-zA-Z{])[a-zA-Z]{2,}|\\forall")


def split_condition(text: str) -> tuple[str, str]:
    """Return (answer, condition): "" for no condition, and for a reason, which is dropped."""
    if match := _ONLY_IN_FRONT.match(text):
        text = text[match.end() :]
    if match := _QUANTIFIER_IN_FRONT.match(text):
        return text[match.end() :], _bare(match[1])
    for pattern in (_BEGINNING, _MEMBERSHIP, _IN_PARENTHESES, _BOUND_BEHIND_COMMA):
        match = pattern.search(text)
        if match is None:
            continue
        answer = text[: match.start()].strip().rstrip(",;(").strip()
        condition = _bare(text[match.start() :])
        if not _may_have_condition(answer, match) or _CASES.search(condition):
            continue
        if pattern is _BEGINNING and match[1]:  # a reason
            return answer, ""
        if _RELATION.search(condition) or _QUANTIFIER.search(condition):
            return answer, condition
    return text, ""


def conditions_agree(gold: str, answer: str) -> bool:
    """True if two conditions may be the same one. They are not if they name two different sets of
    numbers or relations, or if both use "is" and other words: n is even, n is odd.
    """
    if not gold or not answer:
        return True
    gold_set, answer_set = _number_set(gold), _number_set(answer)
    if gold_set and answer_set:
        return gold_set == answer_set
    gold_relation, answer_relation = _relation(gold), _relation(answer)
    if gold_relation and answer_relation:
        return gold_relation == answer_relation or same_text_value(
            gold_relation, answer_relation
        )
    if gold_set or answer_set or gold_relation or answer_relation:
        return True  # of different kinds: one does not contradict the other
    gold_words, answer_words = set(_WORD.findall(gold)), set(_WORD.findall(answer))
    both_use_is = "is" in gold_words and "is" in answer_words
    return gold_words == answer_words if both_use_is else True


def _may_have_condition(answer: str, match: re.Match[str]) -> bool:
    """True if the text in front of the condition is a whole answer and more than a letter. Behind a
    comma, x > 0 is a condition only of a formula or equation with that letter; else it is one of
    several relations.
    """
    if len(answer) < 2 and not answer.isdigit():  # a lone letter or sign
        return False
    if answer.count("(") != answer.count(")") or answer.count("{") != answer.count("}"):
        return False
    if match.re is not _BOUND_BEHIND_COMMA:
        return True
    has_letter = re.search(rf"(?<![a-zA-Z]){match['letter']}(?![a-zA-Z])", answer)
    is_bound_or_list = re.search(rf"{_SIGN}|,", answer)
    return bool(has_letter and not is_bound_or_list)


def _bare(text: str) -> str:
    r"""Return a condition without `\text` and the parentheses around it."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text)
    text = text.replace(r"\text{", " ").strip(" ,;")
    if text.count("(") >= text.count(")"):
        text = text.removeprefix("(")
    if text.count(")") > text.count("("):
        text = text.removesuffix(")")
    return " ".join(text.split())


def _number_set(condition: str) -> str:
    """Return the name of the set of numbers in a condition: N, Z, Q, R; "" if it names none."""
    if match := _SET.search(condition):
        if match[2] == "Z" and _POSITIVE.search(match[1]):
            return "N"
        return match[2]
    for word, name in _SET_WORDS.items():
        if word in condition:
            return name
    return ""


def _relation(condition: str) -> str:
    """Return the relation in a condition, n >= 1 of "for all n >= 1"; "" if it has none, or names a
    set, as n in Z does.
    """
    if _SET.search(condition):
        return ""
    text = " ".join(_WORD.sub(" ", condition).strip(" ,;").split())
    return text if _RELATION.search(text) else ""
