"""Comparison of two answers: words, times, bases, ratios, sequences; then mathematics."""

import re
from contextlib import suppress
from fractions import Fraction
from functools import reduce
from itertools import pairwise
from operator import truediv

from sympy import Expr

from megatron_opsft.verify.conditions import conditions_agree
from megatron_opsft.verify.decimals import same_number
from megatron_opsft.verify.equality import same_text_value, same_value
from megatron_opsft.verify.numerals import (
    Numeral,
    read_base,
    read_clock,
    read_duration,
    read_number,
)
from megatron_opsft.verify.parsing import read_value
from megatron_opsft.verify.reading import (
    Answer,
    is_words,
    may_be_product,
    normalize_text,
    read_options,
    same_words,
)
from megatron_opsft.verify.units import letter_as_unit, units_agree

_TUPLE = re.compile(r"\([^()]*\)")
_HALF_RELATION = re.compile(
    r"(?P<letter>[a-zA-Z]?)\s*(?P<sign><|>|\\le|\\ge|\\ne)(?![a-zA-Z])\s*(?P<bound>[^<>]+)"
)
_RESIDUE = re.compile(
    r"(?:(?P<letter>[a-zA-Z])\s*\\equiv\s*)?(?P<value>[^=]+?)\s*\(?\\pmod\{(?P<modulus>\w+)\}\)?"
)
_DOTS_OF_DECIMAL = re.compile(r"(\.\d+)\s*\\ldots$")
_DOTS = r"\ldots"
_MAX_TERMS = 1000  # of a progression that is written out


def is_understood(answer: Answer) -> bool:
    """True if the whole answer can be read: an option's letter, a time, a numeral, words or
    mathematics.
    """
    body = answer.body
    return answer.readable and bool(
        answer.option
        or read_clock(body)
        or read_base(body)
        or read_duration(body)
        or _RESIDUE.fullmatch(body)
        or is_words(body)
        or read_value(body) is not None
    )


def same_answer(gold: Answer, answer: Answer) -> bool:
    """True if a reading of the gold and one of the answer say the same."""
    gold_text = normalize_text(gold.text)
    if gold_text and gold_text == normalize_text(answer.text):
        return True
    same_option = _same_option(gold, answer)
    if same_option is not None:
        return same_option
    gold_duration = read_duration(gold.text)
    answer_duration = read_duration(answer.text)
    if gold_duration and answer_duration:
        num_units = max(gold_duration.num_units, answer_duration.num_units)
        # 2 hours 30 minutes; a single unit is compared like any other.
        if num_units > 1:
            return gold_duration.seconds == answer_duration.seconds
    names = {normalize_text(name) for name in (gold.name, answer.name) if name}
    other_parts_agree = (
        gold.readable
        and answer.readable
        and units_agree(gold.unit, answer.unit)
        and conditions_agree(gold.condition, answer.condition)
        and len(names) < 2
    )
    if not other_parts_agree:
        return False
    if _adds_percent_to_fraction(gold, answer):
        return _same_with_unit(answer, gold)
    bodies = (gold.body, answer.body)
    words = [body for body in bodies if is_words(body) and not read_clock(body)]
    # A word beside a formula may be a product: abc.
    if len(words) == 2 or (words and not may_be_product(words[0])):
        return same_words(gold.body, answer.body)
    return (
        _same_bodies(gold.body, answer.body)
        or _same_with_unit(gold, answer)
        or _same_with_unit(answer, gold)
    )


def _adds_percent_to_fraction(gold: Answer, answer: Answer) -> bool:
    """True if the answer has a percent sign and the gold is a fraction below one without it: 1/3 %
    is then wrong for 1/3. The sign of a decimal or a whole number may be added.
    """
    if answer.unit != ("%",) or gold.unit:
        return False
    number = read_number(gold.body)
    return isinstance(number, Fraction) and 0 < abs(number) < 1


def _same_option(gold: Answer, answer: Answer) -> bool | None:
    """True if both choose the same letter; None if their texts decide."""
    if gold.option and answer.option:
        same_letter = gold.option == answer.option
        if same_letter and gold.body and answer.body:
            return None
        return same_letter and answer.readable
    if gold.option and not gold.body:
        return answer.text.strip("()") == gold.option.lower()
    gold_options, answer_options = read_options(gold.body), read_options(answer.body)
    has_comma = "," in gold.body + answer.body  # AC for A, C
    if gold_options and answer_options and has_comma:
        return gold_options == answer_options
    # A letter alone is wrong if the gold has none.
    return False if answer.option and not answer.body else None


def _same_with_unit(left: Answer, right: Answer) -> bool:
    """True if both are the same because `left` is a percentage, as 37.5% beside 0.375, or because
    its last letter is a unit, as `5 m` beside 5.
    """
    if left.unit == ("%",) and not right.unit:
        value, right_value = read_value(left.body), read_value(right.body)
        if isinstance(value, Expr) and right_value is not None:
            return same_value(value / 100, right_value)
    if left.unit:
        return False
    quantity = letter_as_unit(left.body, right.unit)
    if quantity is None or not units_agree(quantity.unit, right.unit):
        return False
    return _same_bodies(quantity.body, right.body)


def _same_bodies(gold: str, answer: str) -> bool:
    """True if two values without their units are the same: times, residues, numerals, ratios,
    sequences, mathematics.
    """
    if normalize_text(gold) == normalize_text(answer):
        return True
    gold_clock, answer_clock = read_clock(gold), read_clock(answer)
    if gold_clock and answer_clock:
        named_halves = {gold_clock.half, answer_clock.half} - {""}
        same_half = len(named_halves) < 2  # one side may leave out a.m. or p.m.
        return gold_clock.seconds == answer_clock.seconds and same_half
    gold_residue, answer_residue = _RESIDUE.fullmatch(gold), _RESIDUE.fullmatch(answer)
    if gold_residue and answer_residue:
        return _same_residue(gold_residue, answer_residue)
    has_tuple = _TUPLE.fullmatch(gold) or _TUPLE.fullmatch(answer)
    has_set = gold.startswith(r"\{") or answer.startswith(r"\{")
    if has_tuple and has_set:  # (1, 2) and {1, 2}
        return False
    gold_numeral, answer_numeral = read_base(gold), read_base(answer)
    if gold_numeral and answer_numeral:
        return _same_numeral(gold_numeral, answer_numeral)
    if gold_numeral:
        return _has_digits(answer, gold_numeral)
    if answer_numeral:
        return _has_digits(gold, answer_numeral)
    if ":" in gold + answer:
        return _same_ratio(gold, answer)
    if _DOTS in gold or _DOTS in answer:
        return _same_sequence(gold, answer)
    return _same_half_relation_or_value(gold, answer)


def _same_half_relation_or_value(gold: str, answer: str) -> bool:
    """Compare relations without a left side, > 5, also with x > 5; then numbers and mathematics."""
    gold_relation = _HALF_RELATION.fullmatch(gold)
    answer_relation = _HALF_RELATION.fullmatch(answer)
    relations = [match for match in (gold_relation, answer_relation) if match]
    has_no_left_side = any(not relation["letter"] for relation in relations)
    if has_no_left_side:
        if len(relations) < 2:
            return False
        left, right = relations
        same_sign = left["sign"] == right["sign"]
        return same_sign and _same_bodies(left["bound"], right["bound"])
    gold_number, answer_number = read_number(gold), read_number(answer)
    if gold_number is not None and answer_number is not None:
        return same_number(gold_number, answer_number)
    return same_text_value(gold, answer)


def _same_numeral(gold: Numeral, answer: Numeral) -> bool:
    """Compare two numerals with bases by value."""
    with suppress(ValueError):  # 53_4 has a digit that its base lacks
        return gold == answer or int(*gold) == int(*answer)  # int(digits, base)
    return False


def _has_digits(text: str, numeral: Numeral) -> bool:
    """True if a number without a base has the digits of the numeral."""
    digits = text.replace(" ", "").upper().lstrip("0")
    return digits == numeral.digits.lstrip("0")


def _same_residue(gold: re.Match[str], answer: re.Match[str]) -> bool:
    """Compare two matches of `_RESIDUE`: 3 (mod 7) is x = 3 (mod 7); two names must be the same."""
    if gold["letter"] and answer["letter"] and gold["letter"] != answer["letter"]:
        return False
    same_modulus = gold["modulus"] == answer["modulus"]
    return same_modulus and _same_bodies(gold["value"], answer["value"])


def _same_ratio(gold: str, answer: str) -> bool:
    """True for 1:2 and 2:4, and for 1:2 and 1/2; each term is a value of its own."""
    gold_terms, answer_terms = _terms_of_ratio(gold), _terms_of_ratio(answer)
    if gold_terms is None or answer_terms is None:
        return False
    # 1:2 beside 1/2: divide the terms of the ratio.
    if {len(gold_terms), len(answer_terms)} == {1, 2}:
        return same_value(reduce(truediv, gold_terms), reduce(truediv, answer_terms))
    if len(gold_terms) != len(answer_terms) or 0 in (gold_terms[0], answer_terms[0]):
        return False
    # a:b is c:d if b c = d a.
    return all(
        same_value(gold_term * answer_terms[0], answer_term * gold_terms[0])
        for gold_term, answer_term in zip(gold_terms[1:], answer_terms[1:], strict=True)
    )


def _terms_of_ratio(text: str) -> list[Expr] | None:
    """Return the values of a ratio, perhaps with a name, a:b = 1:2; None if one is no formula."""
    ratio = text.rpartition("=")[2]
    terms = [read_value(term.strip()) for term in ratio.split(":")]
    return terms if all(isinstance(term, Expr) for term in terms) else None


def _same_sequence(gold: str, answer: str) -> bool:
    r"""Compare two answers; sequences with dots, such as 1, 2, \ldots, term by term, where dots
    only equal dots. The dots of 0.33\ldots make no sequence: if neither answer has others, they are
    ignored.
    """
    gold_decimal = _DOTS_OF_DECIMAL.sub(r"\1", gold)
    answer_decimal = _DOTS_OF_DECIMAL.sub(r"\1", answer)
    if _DOTS not in gold_decimal and _DOTS not in answer_decimal:
        return _same_bodies(gold_decimal, answer_decimal)
    gold_terms, answer_terms = _terms_of_sequence(gold), _terms_of_sequence(answer)
    return len(gold_terms) == len(answer_terms) and all(
        map(_same_term, gold_terms, answer_terms)
    )


def _same_term(gold: str, answer: str) -> bool:
    if _DOTS in gold or _DOTS in answer:
        return gold == answer
    return _same_bodies(gold, answer)


def _terms_of_sequence(text: str) -> list[str]:
    """Return the terms, dots as one of them. An arithmetic progression that ends in a number is
    written out; of one that does not, or that has too many terms, only the first two terms stand
    before its dots.
    """
    terms = [term.strip() for term in re.sub(r"^\\\{|\\\}$", "", text).split(",")]
    if _DOTS not in terms:
        return terms
    dots = terms.index(_DOTS)
    numbers = _read_progression(terms[:dots])
    if not numbers:
        return terms
    first, step = numbers[0], numbers[1] - numbers[0]
    last = read_number(terms[-1]) if len(terms) == dots + 2 else None
    if last is not None:
        num_steps = (Fraction(last) - first) / step
        if num_steps.denominator == 1 and 0 < num_steps <= _MAX_TERMS:
            return [str(first + i * step) for i in range(int(num_steps) + 1)]
    return [*terms[:2], *terms[dots:]]


def _read_progression(terms: list[str]) -> list[Fraction]:
    """Return the numbers of an arithmetic progression; [] if the terms are none."""
    numbers = []
    for term in terms:
        number = read_number(term)
        if number is None:
            return []
        numbers.append(Fraction(number))
    steps = {after - before for before, after in pairwise(numbers)}
    return numbers if len(steps) == 1 and 0 not in steps else []
