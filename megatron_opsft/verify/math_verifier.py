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

from megatron_opsft.data.answers import final_boxes
from megatron_opsft.records import Outcome, Verdict
from megatron_opsft.verify import reading
from megatron_opsft.verify.answer import (
    behind_thinking,
    boxed_answer,
    last_formula,
    last_number_is_denied,
    make_verdict,
    stated_answer,
)
from megatron_opsft.verify.comparison import is_understood, same_answer
from megatron_opsft.verify.reading import Answer

_BRACKETED = re.compile(r"\[([^\[\]\n]+)\](?!\()")
_ALTERNATIVES = re.compile(r"\\text\s*\{\s*OR\s*\}")
_WHOLE_EXPONENT = re.compile(r"(-?\d+)e(-?\d)")
_DECIMAL_COMMA = re.compile(r"([+-]?\d+),(\d+)")
# math-verify warns at every first use that its limit is off; the pool's limit is why.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def judge(response_text: str, gold: str) -> Verdict:
    """Compare the answer of a response with the gold answer (LaTeX, a number, or text with maths
    in $...$).

    The same pair always gets the same verdict: sympy's random probes are seeded anew for each
    answer. What sympy cannot compare is WRONG. Errors: whatever sympy raises.
    """
    tail = behind_thinking(response_text)
    golds = _read_gold(gold.strip())
    sympy.core.random.seed(0)
    boxed = boxed_answer(tail)
    candidates = stated_answer(tail) if boxed is None else [boxed] if boxed else []
    if candidates is None:
        if reading.plain(reading.read(tail).text) in [reading.plain(one.text) for one in golds]:
            return make_verdict(Outcome.CORRECT, tail.strip())
        candidates = _found_in_prose(tail)
    if not candidates:
        return make_verdict(Outcome.NO_ANSWER)
    for candidate in candidates:
        answers = _read(candidate)
        if any(same_answer(gold, answer) for gold in golds for answer in answers):
            return make_verdict(Outcome.CORRECT, candidate)
        if any(is_understood(one) and not reading.is_words(one.body) for one in answers):
            return make_verdict(Outcome.WRONG, candidate)
    return make_verdict(Outcome.WRONG, candidates[0])


def _found_in_prose(text: str) -> list[str]:
    """What may be the answer of prose that calls nothing so: what math-verify finds; all of the
    last formula where that is in it, perhaps what follows its last "="; the base of a number goes
    with it; else what the last square brackets hold.
    """
    if last_number_is_denied(text):
        return []
    found = "".join(map(str, parse(text, parsing_timeout=None)[-1:]))
    formula = last_formula(text)
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
    if not any(map(is_understood, readings)) and (formula := last_formula(gold)):
        texts = dict.fromkeys(stated_answer(gold) or [formula])
        readings += [one for text in texts for one in _read(text)]
    return tuple(readings)


def _read(text: str) -> list[Answer]:
    """The readings of one answer: 1,22 is a number to some and two of them to others."""
    readings = [reading.read(text)]
    if match := _WHOLE_EXPONENT.fullmatch(readings[0].body):  # 2e-8 has Euler's number to some
        power = rf"{match[1]}\cdot 10^{{{match[2]}}}"
        return [reading.read(power)] if match[2].isdecimal() else [*readings, reading.read(power)]
    if match := _DECIMAL_COMMA.fullmatch(readings[0].body):
        readings.append(reading.read(f"{match[1]}.{match[2]}"))
    return readings
