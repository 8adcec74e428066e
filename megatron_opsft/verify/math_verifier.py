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
from typing import Any

import sympy
import sympy.core.random
from math_verify import parse

from megatron_opsft.data.boxed import final_boxes
from megatron_opsft.records import Outcome, Verdict
from megatron_opsft.verify import reading
from megatron_opsft.verify.answer import (
    behind_thinking,
    boxed_answer,
    last_number_is_denied,
    make_verdict,
    stated_answer,
)
from megatron_opsft.verify.comparison import is_understood, same_answer, values_of
from megatron_opsft.verify.equality import same_value
from megatron_opsft.verify.reading import Answer

_BRACKETED = re.compile(r"\[([^\[\]\n]+)\](?!\()")
_ALTERNATIVES = re.compile(r"\\text\s*\{\s*OR\s*\}")
_WHOLE_EXPONENT = re.compile(r"(-?\d+)e(-?\d)")
_DECIMAL_COMMA = re.compile(r"([+-]?\d+),(\d+)")
_MARKED = re.compile(r"(?<!\\)\$.+?(?<!\\)\$|\\\(|\\\[", re.DOTALL)
# math-verify warns at every first use that its limit is off; the pool's limit is why.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def judge(response_text: str, gold: str) -> Verdict:
    """Compare the answer of a response with the gold answer (LaTeX, a number, or text with maths
    in $...$).

    The same pair always gets the same verdict: sympy's random probes are seeded anew for each
    answer. What sympy cannot compare is WRONG; what breaks sympy is an exception of any kind.
    """
    tail = behind_thinking(response_text)
    golds = _read_gold(gold.strip())
    sympy.core.random.seed(0)
    boxed = boxed_answer(tail)
    candidates = stated_answer(tail) if boxed is None else [boxed] if boxed else []
    if candidates is None:
        return _judge_prose(tail, golds)
    if not candidates:
        return make_verdict(Outcome.NO_ANSWER)
    for candidate in candidates:
        answers = _read(candidate)
        if any(same_answer(g, answer) for g in golds for answer in answers):
            return make_verdict(Outcome.CORRECT, candidate)
        if any(is_understood(one) and not reading.is_words(one.body) for one in answers):
            return make_verdict(Outcome.WRONG, candidate)
    return make_verdict(Outcome.WRONG, candidates[0])


def _judge_prose(tail: str, golds: tuple[Answer, ...]) -> Verdict:
    """What math-verify finds in prose that calls nothing the answer."""
    whole = reading.plain(reading.read(tail).text)
    if any(reading.plain(gold.text) == whole for gold in golds):
        return make_verdict(Outcome.CORRECT, tail.strip())
    found = [] if last_number_is_denied(tail) else parse(tail, parsing_timeout=None)
    if not found and (brackets := _BRACKETED.findall(tail)):
        found = parse(f"${brackets[-1]}$", parsing_timeout=None)
    if not found:
        return make_verdict(Outcome.NO_ANSWER)
    for gold in golds:
        values = values_of(gold.body)
        for value in found:
            if any(same_value(g, one) for one in _readings_of(value) for g in values):
                return make_verdict(Outcome.CORRECT, str(found[-1]))
    return make_verdict(Outcome.WRONG, str(found[-1]))


def _readings_of(value: Any) -> list[Any]:
    """A value that math-verify found in prose; of 5% also the 5."""
    if isinstance(value, str):
        return []
    percent = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
    if isinstance(value, sympy.Mul) and percent in value.args:
        number = sympy.Mul(*(arg for arg in value.args if arg != percent))
        return [number / 100, number]
    return [value]


@lru_cache(maxsize=4096)
def _read_gold(gold: str) -> tuple[Answer, ...]:
    """The right answers: several where the gold says OR, or can be read in two ways."""
    if boxes := final_boxes(gold):
        gold = ", ".join(boxes)
    parts = _ALTERNATIVES.split(gold)
    readings = [
        one for part in (parts if len(parts) == 1 else [gold, *parts]) for one in _read(part)
    ]
    if not any(is_understood(one) for one in readings) and _MARKED.search(gold):
        formulas = stated_answer(gold) or re.findall(r"(?<!\\)\$+([^$]+)\$", gold)[-1:]
        readings += [one for formula in formulas for one in _read(formula)]
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
