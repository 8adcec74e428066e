"""Judges an answer as mathematics.

Runs inside a worker process of `worker_pool`, which holds the time limit: math-verify's own limit
works by `signal.alarm` and is off here. Imports no torch, so that a worker starts in well under a
second.

A verdict takes four steps, each in a file of its own. An answer that is not understood as a whole
is wrong.

1. `final_answer` finds the text that is the answer: a box, a statement, or a sentence.
2. `spelling` writes it as the gold answer is written (`layout` holds the LaTeX half of its table).
3. `reading` takes apart what it says: option letter, value, unit (`units`), condition
   (`conditions`), time or numeral (`numerals`).
4. `comparison` compares the two. Where the value is mathematics, `parsing` reads it and `equality`
   compares it, with `names` (x = 5), `decimals`, `formulas` and `values`.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import sympy.core.random

from megatron_opsft.data.answers import final_boxes, last_box
from megatron_opsft.records import Outcome, Verdict
from megatron_opsft.verify.comparison import is_understood, same_answer
from megatron_opsft.verify.final_answer import find_answers, only_line
from megatron_opsft.verify.reading import Answer, is_words, read

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
    sympy.core.random.seed(0)
    candidates = find_answers(response_text)
    line = only_line(response_text)
    for read_gold in (_read_gold, _read_gold_sentence):
        golds = read_gold(gold.strip())
        verdict = _compare(candidates, golds)
        if verdict.outcome is Outcome.CORRECT:
            return verdict
        if line and _compare([line], golds).outcome is Outcome.CORRECT:
            return Verdict(outcome=Outcome.CORRECT, answer=line)
    return verdict


def _compare(candidates: Sequence[str], golds: Sequence[Answer]) -> Verdict:
    """CORRECT if the first candidate that can be read, or words before it, is a gold answer."""
    for candidate in candidates:
        answers = _read_answer(candidate)
        if any(same_answer(gold, answer) for gold in golds for answer in answers):
            return Verdict(outcome=Outcome.CORRECT, answer=candidate)
        if any(is_understood(one) and not is_words(one.body) for one in answers):
            return Verdict(outcome=Outcome.WRONG, answer=candidate)
    if not candidates:
        return Verdict(outcome=Outcome.NO_ANSWER)
    return Verdict(outcome=Outcome.WRONG, answer=candidates[0])


@lru_cache(maxsize=4096)
def _read_gold(gold: str) -> tuple[Answer, ...]:
    """The right answers: several where the gold says OR, or can be read in two ways."""
    if boxes := final_boxes(gold):
        gold = ", ".join(boxes)
    elif (box := last_box(gold)) and box.end < 0:  # never closed: all that follows
        gold = gold[gold.index("{", box.start) + 1 :]
    texts = dict.fromkeys([gold, *_ALTERNATIVES.split(gold)])
    return tuple(one for text in texts for one in _read(text))


@lru_cache(maxsize=4096)
def _read_gold_sentence(gold: str) -> tuple[Answer, ...]:
    """What a gold answer says that is a sentence or more, and cannot be read as one answer."""
    if any(map(is_understood, _read_gold(gold))):
        return ()
    texts = [*find_answers(gold), *gold.rpartition("=")[2:]]
    return tuple(one for text in texts if text for one in _read(text))


def _read(text: str) -> list[Answer]:
    """The readings of one text."""
    readings = [read(text)]
    if match := _WHOLE_EXPONENT.fullmatch(
        readings[0].body
    ):  # 2e-8 has Euler's number to some
        power = rf"{match[1]}\cdot 10^{{{match[2]}}}"
        as_power = _with_body(readings[0], power)
        return [as_power] if match[2].isdecimal() else [*readings, as_power]
    if match := _ALL_EQUAL.fullmatch(readings[0].body):  # x = y = 1 is (1, 1)
        values = ", ".join([match[1]] * match[0].count("="))
        readings.append(_with_body(readings[0], f"({values})"))
    return readings


def _read_answer(text: str) -> list[Answer]:
    """The readings of a response's answer: 1,22 is a number to some; a gold's comma separates."""
    readings = _read(text)
    if match := _DECIMAL_COMMA.fullmatch(readings[0].body):
        readings.append(_with_body(readings[0], f"{match[1]}.{match[2]}"))
    return readings


def _with_body(answer: Answer, body: str) -> Answer:
    """The answer with its value written otherwise; unit, condition and option stay."""
    return replace(answer, text=body, body=body)


def forget_golds() -> None:
    """Forget what has been read of gold answers; for tests that change the rules."""
    _read_gold.cache_clear()
    _read_gold_sentence.cache_clear()
