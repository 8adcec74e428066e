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
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse

from megatron_opsft.data.boxed import final_boxes
from megatron_opsft.records import Outcome, Verdict
from megatron_opsft.verify import reading
from megatron_opsft.verify.answer import (
    behind_thinking,
    boxed_answer,
    make_verdict,
    stated_answer,
)
from megatron_opsft.verify.equality import same_number, same_value
from megatron_opsft.verify.numerals import Numeral, read_base, read_clock, read_number
from megatron_opsft.verify.reading import Answer
from megatron_opsft.verify.units import units_agree

_BRACKETED = re.compile(r"\[([^\[\]\n]+)\](?!\()")
_ALTERNATIVES = re.compile(r"\\text\s*\{\s*OR\s*\}")
_DECIMAL_COMMA = re.compile(r"([+-]?\d+),(\d+)")
_MARKED = re.compile(r"(?<!\\)\$.+?(?<!\\)\$|\\\(|\\\[", re.DOTALL)
_HALF_RELATION = re.compile(r"([a-zA-Z]?)\s*(<|>|\\le|\\ge|\\ne)(?![a-zA-Z])\s*([^<>]+)")
# math-verify reads the whole of one box or nothing; units are read before.
_WHOLE = (
    LatexExtractionConfig(
        try_extract_without_anchor=False,
        boxed_match_priority=0,
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last"
        ),
    ),
)

# math-verify warns at every first use that its limit is off; the pool's limit is why.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def judge(response_text: str, gold: str) -> Verdict:
    """Compare the answer of a response with the gold answer (LaTeX, a number, or text with maths
    in $...$).

    Never gives TIMEOUT or UNFINISHED. The same pair always gets the same verdict: sympy's random
    probes are seeded anew for each answer. What sympy cannot compare is WRONG; an exception
    becomes ERROR, but for MemoryError.
    """
    try:
        return _judge(response_text, gold.strip())
    except MemoryError:  # perhaps of earlier answers: another process judges this one
        raise
    except Exception as error:  # foreign output is judged here: whatever it breaks is its outcome
        return make_verdict(Outcome.ERROR, f"{type(error).__name__}: {error}")


def _judge(response_text: str, gold: str) -> Verdict:
    tail = behind_thinking(response_text)
    golds = _read_gold(gold)
    sympy.core.random.seed(0)
    boxed = boxed_answer(tail)
    if boxed == "":
        return make_verdict(Outcome.NO_ANSWER)
    candidates = [boxed] if boxed else stated_answer(tail)
    if not candidates:
        return _judge_prose(tail, golds)
    for candidate in candidates:
        answers = _read(candidate)
        if any(_equal(g, answer) for g in golds for answer in answers):
            return make_verdict(Outcome.CORRECT, candidate)
        if any(_is_understood(answer) for answer in answers):
            return make_verdict(Outcome.WRONG, candidate)
    return make_verdict(Outcome.WRONG, candidates[0])


def _judge_prose(tail: str, golds: tuple[Answer, ...]) -> Verdict:
    """What math-verify finds in prose that calls nothing the answer."""
    if any(reading.plain(gold.text) == reading.plain(reading.read(tail).text) for gold in golds):
        return make_verdict(Outcome.CORRECT, tail.strip())
    found = parse(tail, parsing_timeout=None)
    if not found and (brackets := _BRACKETED.findall(tail)):
        found = parse(f"${brackets[-1]}$", parsing_timeout=None)
    if not found:
        return make_verdict(Outcome.NO_ANSWER)
    for gold in golds:
        values = _values(gold.body)
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
        return [value, sympy.Mul(*(arg for arg in value.args if arg != percent))]
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
    if not any(_is_understood(one) for one in readings) and _MARKED.search(gold):
        formulas = stated_answer(gold) or re.findall(r"(?<!\\)\$+([^$]+)\$", gold)[-1:]
        readings += [one for formula in formulas for one in _read(formula)]
    return tuple(readings)


def _read(text: str) -> list[Answer]:
    """The readings of one answer: 1,22 is a number to some and two of them to others."""
    readings = [reading.read(text)]
    if match := _DECIMAL_COMMA.fullmatch(readings[0].body):
        readings.append(reading.read(f"{match[1]}.{match[2]}"))
    return readings


def _is_understood(answer: Answer) -> bool:
    if not answer.readable:
        return False
    body = answer.body
    return bool(
        answer.option or read_clock(body) or read_base(body)
        or reading.is_words(body) or _values(body)
    )  # fmt: skip


def _equal(gold: Answer, answer: Answer) -> bool:
    """Whether a reading of the gold and one of the answer say the same."""
    if reading.plain(gold.text) == reading.plain(answer.text) != "":
        return True
    if gold.option and answer.option:
        if gold.option != answer.option or not (gold.body and answer.body):
            return gold.option == answer.option and answer.readable
    elif (gold.option and not gold.body) or (answer.option and not answer.body):
        return False
    if not (gold.readable and answer.readable and units_agree(gold.unit, answer.unit)):
        return False
    if reading.is_words(gold.body) or reading.is_words(answer.body):
        return reading.same_words(gold.body, answer.body)
    if _same_bodies(gold.body, answer.body):
        return True
    for left, right in ((gold, answer), (answer, gold)):
        if left.unit == ("%",) and not right.unit and _same_percent(left.body, right.body):
            return True
        lone = reading.with_letter_as_unit(left)
        if lone and units_agree(lone.unit, right.unit) and _same_bodies(lone.body, right.body):
            return True
    return False


def _same_bodies(gold: str, answer: str) -> bool:
    if reading.plain(gold) == reading.plain(answer):
        return True
    clocks = read_clock(gold), read_clock(answer)
    if all(clocks):
        return _same_time(*clocks)
    bases = read_base(gold), read_base(answer)
    if any(bases):
        return _same_in_base(bases, gold, answer)
    if ":" in gold or ":" in answer:
        return _same_ratio(gold, answer)
    if r"\ldots" in gold or r"\ldots" in answer:
        return _same_sequence(gold, answer)
    halves = _HALF_RELATION.fullmatch(gold), _HALF_RELATION.fullmatch(answer)
    if any(half and not half[1] for half in halves):
        return bool(
            halves[0] and halves[1] and halves[0][2] == halves[1][2]
            and _same_bodies(halves[0][3], halves[1][3])
        )  # fmt: skip
    if (left := read_number(gold)) and (right := read_number(answer)):
        return same_number(left, right)
    return any(same_value(g, a) for g in _values(gold) for a in _values(answer))


def _same_time(gold: Any, answer: Any) -> bool:
    return gold[0] == answer[0] and (gold[1] == answer[1] or not (gold[1] and answer[1]))


def _same_in_base(bases: tuple[Any, Any], gold: str, answer: str) -> bool:
    """Two numerals with bases are compared by value; one without has the digits of the other."""
    left, right = bases
    if left and right:
        return left == right or _value_in_base(*left) == _value_in_base(*right) is not None
    digits, other = (left[0], answer) if left else (right[0], gold)
    return other.replace(" ", "").upper().lstrip("0") == digits.lstrip("0")


def _value_in_base(digits: str, base: int) -> int | None:
    try:
        return int(digits, base)
    except ValueError:  # 53_4 has a digit that is none
        return None


def _same_ratio(gold: str, answer: str) -> bool:
    """1:2 is 2:4, and 1/2; each part is a value of its own."""
    named = [side.rpartition("=")[2] for side in (gold, answer)]
    parts = [[_values(part.strip()) for part in side.split(":")] for side in named]
    if not all(values and isinstance(values[0], sympy.Expr) for side in parts for values in side):
        return False
    left, right = ([values[0] for values in side] for side in parts)
    if {len(left), len(right)} == {1, 2}:
        quotients = [side[0] / side[1] if len(side) == 2 else side[0] for side in (left, right)]
        return same_value(*quotients)
    if len(left) != len(right) or left[0] == 0 or right[0] == 0:
        return False
    return all(
        same_value(g * right[0], a * left[0]) for g, a in zip(left[1:], right[1:], strict=True)
    )


def _same_sequence(gold: str, answer: str) -> bool:
    """Term by term, dots where the other has dots; decimals may end in dots."""
    decimals = [re.sub(r"(\.\d+)\s*\\ldots$", r"\1", side) for side in (gold, answer)]
    if not any(r"\ldots" in side for side in decimals):
        return _same_bodies(*decimals)
    left, right = (
        [term.strip() for term in re.sub(r"^\\\{|\\\}$", "", side).split(",")]
        for side in (gold, answer)
    )
    return len(left) == len(right) and all(
        g == a if r"\ldots" in g or r"\ldots" in a else _same_bodies(g, a)
        for g, a in zip(left, right, strict=True)
    )


def _same_percent(percent: str, other: str) -> bool:
    """37.5% is 0.375."""
    return any(
        same_value(value / 100, right)
        for value in _values(percent)
        if isinstance(value, sympy.Expr)
        for right in _values(other)
    )


@lru_cache(maxsize=4096)
def _values(body: str) -> tuple[Any, ...]:
    """What math-verify makes of the whole of it; () where it cannot."""
    number = read_number(body)
    if number:
        return (_as_sympy(number),)
    if r"\ldots" in body or re.search(r"\d\s+\d|\d\s*_", body):
        return ()
    found = parse(f"\\boxed{{{body}}}", _WHOLE, fallback_mode="no_fallback", parsing_timeout=None)
    return tuple(value for value in found if not isinstance(value, str))


def _as_sympy(number: Numeral) -> sympy.Number:
    value = sympy.Rational(number.value.numerator, number.value.denominator)
    return sympy.Float(value, max(15, number.digits)) if number.digits else value
