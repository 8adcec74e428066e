"""Where every shipped judge looks for the answer, and the two that compare text: `choice`, `exact`.

Those read the answer behind the last `</think>` (in all of the text where there is none): the last
`\\boxed{...}`, else all of it; nothing where the last box is never closed.
"""

import re

from megatron_opsft.data.answers import final_boxes, last_box
from megatron_opsft.records import Outcome, Verdict

THINK_END = "</think>"
MAX_ANSWER_CHARS = 500  # of the answer kept in a verdict, for the log

_FINAL_ANSWER = re.compile(r"final answer[^\n]{0,100}?\bis\b", re.IGNORECASE)
_STATEMENT = re.compile(
    r"\b(?:answers?|ans)\b\.?[*_]*"
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
# A letter at the beginning, perhaps in brackets or a wrapper: B, (b), B. 42, \text{(B)}.
_LEADING = re.compile(r"\W*(?:(?:text|textbf|mathrm|mathbf)\W+)?([A-Ea-e])(?![^\W_])")
# What is called the answer comes before what is only mentioned.
_SAID = tuple(
    re.compile(rf"(?i:\b(?:{words})\b)(?i:\W*\b(?:is|option|choice)\b)*\W*([A-E])(?![^\W_])")
    for words in ("answer", "option|choice")
)
_BRACKETED = re.compile(r"\(([A-E])\)")


def behind_thinking(text: str) -> str:
    """What follows the last `</think>`; all of the text where there is none."""
    return text.rpartition(THINK_END)[2]


def boxed_answer(text: str) -> str | None:
    """The last box and those joined to it; "" where it is never closed, None where there is none
    or "the final answer is" comes after it.
    """
    box = last_box(text)
    if box is None or (box.content and _FINAL_ANSWER.search(text, box.end)):
        return None
    return ", ".join(final_boxes(text)) if box.content else ""


def stated_answer(text: str) -> list[str] | None:
    """What follows the last "answer is", "Answer:" and the like, up to the end of its sentence or
    line, and then what may be the answer in that. Of words ("this answer is consistent") also what
    was called the answer before. [] where the last one denies an answer or says none. None where
    nothing is called the answer.
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
    """Inside the last formula marks; "" where there are none."""
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
    """What may be the answer of a sentence that says more: what follows its last "is"; its only
    formula; its only number, but in one that compares.
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
    """The answer cut to what is kept."""
    return Verdict(outcome=outcome, answer=answer[:MAX_ANSWER_CHARS])


def choice(text: str, gold: str) -> Verdict:
    """A letter from A to E: in the box, else after the last "answer", else after the last "option"
    or "choice", else in the last round brackets, else at the beginning of the last line. A gold
    answer without one is an ERROR.
    """
    wanted = _LEADING.match(gold)
    if wanted is None:
        return make_verdict(Outcome.ERROR, f"the gold answer {gold!r} is not a letter from A to E")
    letter = _read_letter(text)
    return _compared(letter, letter == wanted[1].upper())


def exact(text: str, gold: str) -> Verdict:
    """The same text but for white space."""
    answer = _read_answer(text)
    return _compared(answer, answer.split() == gold.split())


def _compared(answer: str, same: bool) -> Verdict:
    if not answer:
        return make_verdict(Outcome.NO_ANSWER)
    return make_verdict(Outcome.CORRECT if same else Outcome.WRONG, answer)


def _read_answer(text: str) -> str:
    tail = behind_thinking(text)
    box = last_box(tail)
    return tail.strip() if box is None else box.content


def _read_letter(text: str) -> str:
    """Upper case; "" where there is none."""
    tail = behind_thinking(text).strip()
    box = last_box(tail)
    if box is not None:
        match = _LEADING.match(box.content)
        return match[1].upper() if match else ""
    for pattern in (*_SAID, _BRACKETED):
        if found := pattern.findall(tail):
            return found[-1]
    last_line = tail.rpartition("\n")[2]
    match = re.match(r"\W*([A-E])(?:\W*$|[.):])", last_line)
    return match[1] if match else ""
