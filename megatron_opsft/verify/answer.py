"""Where the judge of mathematics looks for the answer in a response."""

import re

from megatron_opsft.data.answers import final_boxes, last_box
from megatron_opsft.records import Outcome, Verdict

THINK_END = "</think>"
MAX_ANSWER_CHARS = 500  # of the answer kept in a verdict, for the log

_FINAL_ANSWER = re.compile(r"final answer[^\n]{0,100}?\bis\b", re.IGNORECASE)
_STATEMENT = re.compile(
    r"\b(?:answers?|ans|(?:correct|right|best) (?:option|choice))\b\.?[*_]*"
    r"(?:[^\n.:：=$\\]{0,60}?\b(?:is|are|be|was|(?:is|are|was)n't)\b\s*[:：]?|\s*[:：=])[*_\s]*"
    r"(?:(?:therefore|thus|hence|clearly|simply|just|indeed|then|given by|equal to)\b,?\s*)*",
    re.IGNORECASE,
)
_STATED = re.compile(
    r"(\\\[.*?\\\]|\$\$.*?\$\$)"
    r"|[^\n]*?(?=\.\s+[A-Z*<]|\.?[*_]*\s*(?:\n|$)"
    r"|[,;]?\s+(?:because|since|which|where|so that|when|for|as|but|though|although|while)\b)",
    re.DOTALL,
)
_FORMULA = re.compile(r"(?<!\\)\$\$?((?:\\\$|[^$])+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_IS = re.compile(r"\b(?:is|are|equals)\b")
_FORMULAS = re.compile(r"\$[^$]*\$|\\text\s*\{[^{}]*\}")  # what formulas deny is their own
_NUMBERS = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_DENIES = re.compile(
    r"n't\b|\?|\b(?:not|never|cannot|unlikely|unknown|impossible|guess|wrong|incorrect)\b",
    re.IGNORECASE,
)
_COMPARES = re.compile(
    r"[<>≤≥≠/^*+:_=\\]"
    r"|\b(?:no|least|most|more|less|than|between|about|or|and|over|under|above|below|to)\b",
    re.IGNORECASE,
)


def behind_thinking(text: str) -> str:
    """What follows the last `</think>`; all of the text where there is none."""
    return text.rpartition(THINK_END)[2]


def boxed_answer(text: str) -> str | None:
    """The last box and those joined to it. "" where the last one is empty or never closed; None
    where there is none, or where "the final answer is" follows it.
    """
    box = last_box(text)
    if box is None or (box.content and _FINAL_ANSWER.search(text, box.end)):
        return None
    return ", ".join(final_boxes(text)) if box.content else ""


def stated_answer(text: str) -> list[str] | None:
    """What the text calls its answer: what follows the last "answer is", "Answer:" and the like, up
    to the end of the sentence or line, and then the parts of it that may be the answer.

    Where that is only words ("this answer is consistent"), the statement before it counts too. []
    where the last statement denies an answer or gives none; None where there is no statement.
    """
    candidates: list[str] | None = None
    for match in reversed(list(_STATEMENT.finditer(text))):
        stated = _STATED.match(text, match.end())
        answer = stated[0].strip().strip("*").strip() if stated else ""
        sentence = re.split(r"[.!?]\s", text[: match.end()].rpartition("\n")[2])[-1]
        if not answer or _DENIES.search(sentence + _FORMULAS.sub("", answer)):
            return candidates or []
        candidates = [*(candidates or []), answer, *_parts_of(answer)]
        if ":" in match[0] or re.search(r"[\d$\\]", answer):
            break
    return candidates


def last_formula(text: str) -> str:
    """What the last formula marks ($...$ and the like) hold; "" where there are none."""
    found = _FORMULA.findall(text)
    return "".join(found[-1]).strip() if found else ""


def last_number_is_denied(text: str) -> bool:
    """Whether the last number is asked for or denied: "Was it 34?", "It is not 34."."""
    sentences = re.split(r"(?<=[.!?])\s+|\n", text[-2000:])
    numbers = [_NUMBERS.split(part) for part in sentences if _NUMBERS.search(part)]
    if not numbers:
        return False
    before, behind = numbers[-1][-2:]
    return _DENIES.search(_FORMULAS.sub("", before)) is not None or "?" in behind


def _parts_of(sentence: str) -> list[str]:
    """What may be the answer in a sentence that says more: what follows its last "is"; its only
    formula; its only number, unless the sentence compares it with something.
    """
    parts = [text.strip() for text in _IS.split(sentence)[1:][-1:]]
    formulas = ["".join(found) for found in _FORMULA.findall(sentence)]
    if len(formulas) == 1:
        return [*parts, *formulas]
    numbers = _NUMBERS.findall(sentence)
    if not formulas and len(numbers) == 1 and not _COMPARES.search(sentence):
        parts.append(numbers[0])
    return parts


def make_verdict(outcome: Outcome, answer: str = "") -> Verdict:
    """A verdict with the answer cut to `MAX_ANSWER_CHARS`."""
    return Verdict(outcome=outcome, answer=answer[:MAX_ANSWER_CHARS])
