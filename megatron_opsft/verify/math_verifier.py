"""Judges one answer as mathematics: math-verify, with one spelling of both sides in front of it.

Runs inside a worker process of `worker_pool`, which holds the time limit: math-verify's own limit
works by `signal.alarm` and is off here. Imports no torch, so that a worker starts in well under a
second.

What counts as the answer: of the text behind the last `</think>` (all of it where there is none)
the last box with those joined to it; without one, or when "the final answer is" comes after it,
what a sentence or line calls the answer; without that, what math-verify finds in the prose. An
answer that is not understood as a whole is wrong.
"""

import logging
import re
from functools import lru_cache

import sympy
import sympy.core.random
from math_verify import parse

from megatron_opsft.data.answers import final_boxes, last_box
from megatron_opsft.records import Outcome, Verdict
from megatron_opsft.verify import reading, spelling
from megatron_opsft.verify.comparison import is_understood, same_answer
from megatron_opsft.verify.reading import Answer

THINK_END = "</think>"
_FINAL_ANSWER = re.compile(r"(?i)final answer[^\n.]{0,99}?\bis\b[:*_\s]*(?=[-+\d$\\(\[])")
_MARKUP = re.compile(r"</?answer>|(?<![\w\\*])(\*{1,3}|__|`)(?=\S)(.+?)(?<=\S)\1(?![\w*])")
_STATEMENT = re.compile(
    r"^[#>\s]*(?:the\s+)?(?:final\s+)?answers?\s*\n\s*|(?:答案|故选)[是为：:】\s]*"
    r"|\b(?:answers?|ans|(?:correct|right|best|final) (?:option|choice))\b\.?[*_]*"
    r"(?:[^\n.:：=$\\]{0,60}?\b(?:is|are|be|was|(?:is|are|was)n't)\b\s*[:：]?|\s*[:：=])[*_\s]*"
    r"(?:(?:therefore|thus|hence|clearly|simply|just|indeed|then|given by|equal to)\b,?\s*)*",
    re.IGNORECASE | re.MULTILINE,
)
_CHOSEN = re.compile(
    r"(?:^|\b(?:option|choice)\s+)\(?([A-J])\)?(?:\s+is\s+(?:the\s+)?(?:correct|right|answer)|\.?\s*\Z)"
    r"|\b([A-J])\b\)?\s+is\s+the\s+(?:(?:correct|right)\s+)?(?:answer|option|choice)"
    r"|\(([A-J])\)\s+is\s+(?:correct|right)|^(\(?[A-J][).:]\)?\s+[-\d$\\(][^\n]*)\Z",
    re.IGNORECASE | re.MULTILINE,
)
_SIDE_CONDITION = re.compile(
    r",?\s*\(?(?:which (?:is|occurs)|attained|achieved|reached|obtained|occurring)\s+"
    r"(?:at|when|for|by|if)\b[^.\n]*"
)
_STATED = re.compile(
    r"(\\\[.*?\\\]|\$\$.*?\$\$)"
    r"|[^\n]*?(?=。|\.\s+[A-Z*<]|\.?[*_]*\s*(?:\n|$)"
    r"|[,;]?\s+\(?(?:because|since|which|where|so that|when|for|as|but|though|although|while"
    r"|attained|achieved|reached)\b|\s+\((?:see|i\.e|\$?\s*=)"
    r"|,\s+(?:not|approximately|about|roughly|it)\b)",
    re.DOTALL,
)
_FORMULA = re.compile(r"(?<!\\)\$\$?((?:\\\$|[^$])+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_IS = re.compile(r"\b(?:is|are|equals)\b")
_FORMULAS = re.compile(r"\$[^$]*\$|\\text\s*\{[^{}]*\}")  # what formulas deny is their own
_NUMBERS = re.compile(r"-?\d(?:[\d,]*\d)?(?:\.\d+)?")
_DENIES = re.compile(
    r"n't\b|\?|\b(?:not|never|cannot|unlikely|unknown|impossible|guess|wrong|incorrect)\b",
    re.IGNORECASE,
)
_IS_DENIED_OR_GOES_ON = re.compile(
    r"[\W_]*(?:which\s+)?(?:is|was)\s+(?:not|wrong|incorrect|impossible)\b"
    rf"|\s*(?:[π+*/^]|e\d|{spelling.SCALE}|dozen)"
)
_IS_OF_SEVERAL = re.compile(r"(?:\s*,|,?\s+(?:or|and))\s*(?:[a-z]\s*=\s*)?")
_COMPARES = re.compile(
    r"[<>≤≥≠/^*+:_=\\]"
    r"|\b(?:no|least|most|more|less|than|between|about|or|and|over|under|above|below|to)\b",
    re.IGNORECASE,
)
_BRACKETED = re.compile(r"\[([^\[\]\n]+)\](?!\()")
_ALTERNATIVES = re.compile(r"\\text\s*\{\s*OR\s*\}")
_WHOLE_EXPONENT = re.compile(r"(-?\d+)e(-?\d)")
_ALL_EQUAL = re.compile(r"[a-z]\s*(?:=\s*[a-z]\s*)+=([^=a-z]+)")
_DECIMAL_COMMA = re.compile(r"([+-]?\d+),(\d+)")
# math-verify warns at every first use that its limit is off; the pool's limit is why.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def judge(response_text: str, gold: str) -> Verdict:
    """Compare the answer of a response with the gold answer (LaTeX, a number, or text with maths
    in $...$).

    The same pair always gets the same verdict: sympy's random probes are seeded anew for each
    answer. What sympy cannot compare is WRONG. Errors: whatever sympy raises.
    """
    tail = response_text.rpartition(THINK_END)[2]
    golds = _read_gold(gold.strip())
    sympy.core.random.seed(0)
    boxed = _boxed_answer(tail)
    if boxed is None:
        tail = _MARKUP.sub(r"\2", tail)
    candidates = _stated_answer(tail) if boxed is None else [boxed] if boxed else []
    if candidates is None and (chosen := _CHOSEN.findall(tail)):
        candidates = ["".join(chosen[-1])]
    if candidates is None:
        if reading.plain(reading.read(tail).text) in [reading.plain(one.text) for one in golds]:
            return Verdict(outcome=Outcome.CORRECT, answer=tail.strip())
        candidates = _found_in_prose(tail)
    if not candidates:
        return Verdict(outcome=Outcome.NO_ANSWER)
    for candidate in candidates:
        answers = _read_answer(candidate)
        if any(same_answer(gold, answer) for gold in golds for answer in answers):
            return Verdict(outcome=Outcome.CORRECT, answer=candidate)
        if any(is_understood(one) and not reading.is_words(one.body) for one in answers):
            return Verdict(outcome=Outcome.WRONG, answer=candidate)
    return Verdict(outcome=Outcome.WRONG, answer=candidates[0])


def _found_in_prose(text: str) -> list[str]:
    """What may be the answer of prose that calls nothing so: what math-verify finds; all of the
    last formula where that is in it, perhaps what follows its last "="; the base of a number goes
    with it; else what the last square brackets hold.
    """
    text = _SIDE_CONDITION.sub("", text.replace(r"\$", ""))
    if _last_number_is_denied(text):
        return []
    found = "".join(map(str, parse(text, parsing_timeout=None)[-1:]))
    formula = _last_formula(text)
    if formula and found in formula:
        end = formula.rpartition("=")[2]
        return [formula, end] if end.count("{") == end.count("}") else [formula]
    if found and (based := re.findall(rf"{re.escape(found)}_{{?\d+}}?", text)):
        return based[-1:]
    return [found] if found else _BRACKETED.findall(text)[-1:]


@lru_cache(maxsize=4096)
def _read_gold(gold: str) -> tuple[Answer, ...]:
    """The right answers: several where the gold says OR, or can be read in two ways."""
    if boxes := final_boxes(gold):
        gold = ", ".join(boxes)
    texts = dict.fromkeys([gold, *_ALTERNATIVES.split(gold)])
    readings = [one for text in texts for one in _read(text)]
    if not any(map(is_understood, readings)) and (formula := _last_formula(gold)):
        texts = dict.fromkeys(_stated_answer(gold) or [formula])
        readings += [one for text in texts for one in _read(text)]
    return tuple(readings)


def _read(text: str) -> list[Answer]:
    """The readings of one text."""
    readings = [reading.read(text)]
    if match := _WHOLE_EXPONENT.fullmatch(readings[0].body):  # 2e-8 has Euler's number to some
        power = rf"{match[1]}\cdot 10^{{{match[2]}}}"
        return [reading.read(power)] if match[2].isdecimal() else [*readings, reading.read(power)]
    if match := _ALL_EQUAL.fullmatch(readings[0].body):  # x = y = 1 is (1, 1)
        readings.append(reading.read(f"({', '.join([match[1]] * match[0].count('='))})"))
    return readings


def _read_answer(text: str) -> list[Answer]:
    """The readings of a response's answer: 1,22 is a number to some; a gold's comma separates."""
    readings = _read(text)
    if match := _DECIMAL_COMMA.fullmatch(readings[0].body):
        readings.append(reading.read(f"{match[1]}.{match[2]}"))
    return readings


def _boxed_answer(text: str) -> str | None:
    """The last box and those joined to it. "" where the last one is empty or never closed; None
    where there is none, or where "the final answer is" follows it.
    """
    box = last_box(text)
    if box is None or (box.content and _FINAL_ANSWER.search(text, box.end)):
        return None
    return ", ".join(final_boxes(text)) if box.content else ""


def _stated_answer(text: str) -> list[str] | None:
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


def _last_formula(text: str) -> str:
    """What the last formula marks ($...$ and the like) hold; "" where there are none."""
    found = _FORMULA.findall(text)
    return "".join(found[-1]).strip() if found else ""


def _last_number_is_denied(text: str) -> bool:
    """Whether the last number is asked for, denied or a part: "Was it 34?", "It is 6 or 34."."""
    sentences = re.split(r"(?<=[.!?])\s+|\n", text[-2000:])
    numbers = [_NUMBERS.split(part) for part in sentences if _NUMBERS.search(part)]
    if not numbers:
        return False
    before, behind = numbers[-1][-2:]
    in_prose = not set("$\\({[") & set("".join(numbers[-1]))
    is_part = in_prose and (_IS_OF_SEVERAL.fullmatch(before) or _IS_DENIED_OR_GOES_ON.match(behind))
    return bool(is_part or _DENIES.search(_FORMULAS.sub("", before)) or "?" in behind)


def _parts_of(sentence: str) -> list[str]:
    """What may be the answer in a sentence that says more: what follows its last "is"; its only
    formula; its only number, unless the sentence compares it with something.
    """
    parts = [text.strip() for text in _IS.split(sentence)[1:][-1:]]
    formulas = ["".join(found) for found in _FORMULA.findall(sentence)]
    if len(formulas) == 1 and not re.search(r"\b(?:than|least|most) *[$\\]", sentence):
        return [*parts, *formulas]
    numbers = _NUMBERS.findall(sentence)
    if not formulas and len(numbers) == 1 and not _COMPARES.search(sentence):
        parts.append(numbers[0])
    return parts
