"""Whether two answers say the same: words, times, bases, ratios, sequences; then mathematics."""

import re
from contextlib import suppress
from fractions import Fraction
from itertools import pairwise
from typing import Any

import sympy

from megatron_opsft.verify.conditions import conditions_agree
from megatron_opsft.verify.decimals import same_number
from megatron_opsft.verify.equality import same_value
from megatron_opsft.verify.numerals import (
    read_base,
    read_clock,
    read_duration,
    read_number,
)
from megatron_opsft.verify.parsing import values_of
from megatron_opsft.verify.reading import (
    Answer,
    is_words,
    may_be_product,
    plain,
    read_options,
    same_words,
)
from megatron_opsft.verify.units import letter_as_unit, units_agree

_TUPLE = re.compile(r"\([^()]*\)")
_HALF_RELATION = re.compile(
    r"([a-zA-Z]?)\s*(<|>|\\le|\\ge|\\ne)(?![a-zA-Z])\s*([^<>]+)"
)
_RESIDUE = re.compile(r"(?:([a-zA-Z])\s*\\equiv\s*)?([^=]+?)\s*\(?\\pmod\{(\w+)\}\)?")
_MAX_TERMS = 1000  # of a progression that is written out


def is_understood(answer: Answer) -> bool:
    """Whether the whole answer can be read: letter, time, numeral, words or mathematics."""
    if not answer.readable:
        return False
    body = answer.body
    return bool(
        answer.option or read_clock(body) or read_base(body) or read_duration(body)
        or _RESIDUE.fullmatch(body) or is_words(body) or values_of(body)
    )  # fmt: skip


def same_answer(gold: Answer, answer: Answer) -> bool:
    """Whether a reading of the gold and one of the answer say the same."""
    if plain(gold.text) == plain(answer.text) != "":
        return True
    option = _same_option(gold, answer)
    if option is not None:
        return option
    durations = read_duration(gold.text), read_duration(answer.text)
    if durations[0] and durations[1] and max(durations[0][1], durations[1][1]) > 1:
        return durations[0][0] == durations[1][0]
    if not (gold.readable and answer.readable and units_agree(gold.unit, answer.unit)):
        return False
    if not conditions_agree(gold.condition, answer.condition):
        return False
    if gold.name and answer.name and plain(gold.name) != plain(answer.name):
        return False
    if _adds_percent(gold, answer):
        return _same_with_unit(answer, gold)
    words = [is_words(one.body) and not read_clock(one.body) for one in (gold, answer)]
    if all(words) or (
        any(words) and not may_be_product((gold if words[0] else answer).body)
    ):
        return same_words(gold.body, answer.body)
    same = _same_bodies(gold.body, answer.body)
    return same or _same_with_unit(gold, answer) or _same_with_unit(answer, gold)


def _adds_percent(gold: Answer, answer: Answer) -> bool:
    """Whether an answer has a percent sign that a gold fraction below one lacks: 1/3 is not 1/3 %.
    The sign of a decimal or a whole number may be left out.
    """
    if answer.unit != ("%",) or gold.unit:
        return False
    number = read_number(gold.body)
    return isinstance(number, Fraction) and 0 < abs(number) < 1


def _same_option(gold: Answer, answer: Answer) -> bool | None:
    """Whether they choose the same letter; None where the rest of them decides."""
    if gold.option and answer.option:
        if gold.option == answer.option and gold.body and answer.body:
            return None
        return gold.option == answer.option and answer.readable
    if gold.option and not gold.body:
        return answer.text.strip("()") == gold.option.lower()
    (golds, separated), (answers, others_separated) = map(
        read_options, (gold.body, answer.body)
    )
    if golds and answers and (separated or others_separated):  # AC for A, C
        return golds == answers
    return False if answer.option and not answer.body else None


def _same_with_unit(one: Answer, other: Answer) -> bool:
    """37.5% for 0.375, and `5 m` for 5."""
    if one.unit == ("%",) and not other.unit:
        numbers = [
            value for value in values_of(one.body) if isinstance(value, sympy.Expr)
        ]
        if any(
            same_value(value / 100, v)
            for value in numbers
            for v in values_of(other.body)
        ):
            return True
    found = None if one.unit else letter_as_unit(one.body, other.unit)
    if found is None:
        return False
    body, unit = found
    return units_agree(unit, other.unit) and _same_bodies(body, other.body)


def _same_bodies(gold: str, answer: str) -> bool:
    """Whether what is left without units says the same: times, numerals, ratios, mathematics."""
    if plain(gold) == plain(answer):
        return True
    clocks = read_clock(gold), read_clock(answer)
    if clocks[0] and clocks[1]:
        (seconds, half), (other_seconds, other_half) = clocks[0], clocks[1]
        return seconds == other_seconds and (
            half == other_half or not (half and other_half)
        )
    residues = _RESIDUE.fullmatch(gold), _RESIDUE.fullmatch(answer)
    if residues[0] and residues[1]:
        return _same_residue(residues[0], residues[1])
    if any(map(_TUPLE.fullmatch, (gold, answer))) and r"\{" in (gold[:2], answer[:2]):
        return False  # a set is not a tuple
    bases = read_base(gold), read_base(answer)
    if any(bases):
        return _same_in_base(*bases, gold, answer)
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
    left, right = read_number(gold), read_number(answer)
    if left is not None and right is not None:
        return same_number(left, right)
    return any(same_value(g, a) for g in values_of(gold) for a in values_of(answer))


def _same_in_base(left: Any, right: Any, gold: str, answer: str) -> bool:
    """Two numerals with bases are compared by value; one without has the digits of the other."""
    if left and right:
        with suppress(ValueError):  # 53_4 has a digit that is none
            return left == right or int(*left) == int(*right)
        return False
    digits, other = (left[0], answer) if left else (right[0], gold)
    return other.replace(" ", "").upper().lstrip("0") == digits.lstrip("0")


def _same_residue(gold: re.Match[str], answer: re.Match[str]) -> bool:
    """3 (mod 7) is x = 3 (mod 7); two names are the same one."""
    if gold[1] and answer[1] and gold[1] != answer[1]:
        return False
    return gold[3] == answer[3] and _same_bodies(gold[2], answer[2])


def _same_ratio(gold: str, answer: str) -> bool:
    """1:2 is 2:4, and 1/2; each part is a value of its own."""
    named = [side.rpartition("=")[2] for side in (gold, answer)]
    parts = [[values_of(part.strip()) for part in side.split(":")] for side in named]
    if not all(
        values and isinstance(values[0], sympy.Expr)
        for side in parts
        for values in side
    ):
        return False
    left, right = ([values[0] for values in side] for side in parts)
    if {len(left), len(right)} == {1, 2}:
        quotients = [
            side[0] / side[1] if len(side) == 2 else side[0] for side in (left, right)
        ]
        return same_value(*quotients)
    if len(left) != len(right) or left[0] == 0 or right[0] == 0:
        return False
    return all(
        same_value(g * right[0], a * left[0])
        for g, a in zip(left[1:], right[1:], strict=True)
    )


def _same_sequence(gold: str, answer: str) -> bool:
    """Term by term, dots where the other has dots; decimals may end in dots."""
    decimals = [re.sub(r"(\.\d+)\s*\\ldots$", r"\1", side) for side in (gold, answer)]
    if not any(r"\ldots" in side for side in decimals):
        return _same_bodies(*decimals)
    left, right = map(_terms, (gold, answer))
    return len(left) == len(right) and all(
        g == a if r"\ldots" in g or r"\ldots" in a else _same_bodies(g, a)
        for g, a in zip(left, right, strict=True)
    )


def _terms(sequence: str) -> list[str]:
    """The terms; of an arithmetic progression all, or two where its end is not a number."""
    terms = [term.strip() for term in re.sub(r"^\\\{|\\\}$", "", sequence).split(",")]
    if r"\ldots" not in terms:
        return terms
    dots = terms.index(r"\ldots")
    numbers = [Fraction(n) for n in map(read_number, terms[:dots]) if n is not None]
    if len(numbers) < max(2, dots):
        return terms
    step = numbers[1] - numbers[0]
    if step == 0 or any(b - a != step for a, b in pairwise(numbers)):
        return terms
    end = read_number(terms[-1]) if len(terms) == dots + 2 else None
    count = Fraction(-1) if end is None else (Fraction(end) - numbers[0]) / step
    if count.denominator == 1 and 0 < count <= _MAX_TERMS:
        return [str(numbers[0] + index * step) for index in range(int(count) + 1)]
    return [*terms[:2], *terms[dots:]]
