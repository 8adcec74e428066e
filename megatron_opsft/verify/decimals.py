"""Comparison of two numbers: exact ones must be equal, decimals may be rounded."""

from decimal import Decimal
from fractions import Fraction

from sympy import Expr, Float, N, Rational, nan, zoo

from megatron_opsft.verify.formulas import with_real_roots
from megatron_opsft.verify.numerals import Number, as_number
from megatron_opsft.verify.values import exact

RELATIVE_TOLERANCE = Fraction(1, 10**6)
ROUNDED_DIGITS = 6  # a decimal with fewer significant digits is exact
FLOAT_NOISE = Fraction(1, 10**13)  # 0.1 + 0.2, as programs write it
_NOISE_DIGITS = 12  # a decimal with more digits may have float noise
_LARGEST = Float("1e200000", 30)  # digits of more would fill the memory
_COMPARED_DIGITS = 1000  # up to which exact numbers are computed, to see if they agree
_VANISHING = Float("1e-900", 30)


def same_number(left: Number, right: Number) -> bool:
    """True if two numbers are equal. Exact numbers must be the same.

    A decimal of six or more significant digits may be a rounded value: within 1e-6 of the value and
    one unit of its last digit, unless the other number is whole or a decimal of fewer than six
    digits. Float noise (1e-13) of longer decimals is ignored.
    """
    difference = abs(Fraction(left) - Fraction(right))
    if difference == 0:
        return True
    larger = max(abs(Fraction(left)), abs(Fraction(right)))
    digits = max(_num_digits(left), _num_digits(right))
    if digits > _NOISE_DIGITS and difference <= FLOAT_NOISE * larger:
        return True
    if _is_surely_exact(left) or _is_surely_exact(right):
        return False
    last_place = max(_last_place(left), _last_place(right))
    return difference < last_place and difference <= RELATIVE_TOLERANCE * larger


def same_values_of_numbers(gold: Expr, answer: Expr) -> bool:
    """True if two expressions without letters are the same number. Numbers that are written out are
    compared by `same_number`; a decimal may also be the rounded value of the other expression.
    """
    gold_exact = with_real_roots(exact(gold).doit())
    answer_exact = with_real_roots(exact(answer).doit())
    if gold_exact == answer_exact and not gold_exact.has(nan, zoo):
        return True
    gold_value, answer_value = N(gold_exact, 30), N(answer_exact, 30)
    if {gold_value, answer_value} & {nan, zoo}:
        return False
    if gold_value.is_infinite or answer_value.is_infinite:
        return gold_value == answer_value
    scale = max(abs(gold_value), abs(answer_value))
    difference = abs(gold_value - answer_value)
    may_be_rounded = difference <= scale * Rational(RELATIVE_TOLERANCE)
    if not may_be_rounded or scale > _LARGEST:
        return False
    gold_number, answer_number = _as_written(gold), _as_written(answer)
    if gold_number is not None and answer_number is not None:
        return same_number(gold_number, answer_number)
    # At least one is no written number, but an expression such as sqrt(2).
    decimal = answer_number if gold_number is None else gold_number
    if isinstance(decimal, Decimal) and _num_digits(decimal) >= ROUNDED_DIGITS:
        margin = min(RELATIVE_TOLERANCE * abs(Fraction(decimal)), _last_place(decimal))
        return bool(difference <= Rational(margin))
    exact_difference = N(gold_exact - answer_exact, 2, maxn=_COMPARED_DIGITS)
    return bool(abs(exact_difference) <= scale * _VANISHING)


def _num_digits(number: Number) -> int:
    """Return how many digits of a decimal are significant; 0 for an exact number."""
    return len(number.as_tuple().digits) if isinstance(number, Decimal) else 0


def _last_place(number: Number) -> Fraction:
    """Return the value of a 1 in the last digit of a decimal; 0 for an exact number."""
    if isinstance(number, Fraction):
        return Fraction(0)
    return Fraction(10) ** int(number.as_tuple().exponent)


def _is_surely_exact(number: Number) -> bool:
    """True for a whole number, and for one of fewer than six decimal digits, written as a decimal
    or as a fraction: 0.375, 3/8. False for 1/3, and for 0.333333, which may be rounded.
    """
    # A number that is written without a point is a Fraction.
    if isinstance(number, Decimal):
        return _num_digits(number) < ROUNDED_DIGITS
    if number.denominator == 1:
        return True
    # 3/8 = 0.375 is whole once its point is moved far to the right; 1/3 never is.
    shifted = number * 10**100
    digits = str(abs(shifted.numerator)).rstrip("0")
    return shifted.denominator == 1 and len(digits) < ROUNDED_DIGITS


def _as_written(value: Expr) -> Number | None:
    """Return the number as it is written, a decimal or a fraction; None for anything else."""
    if isinstance(value, Float):  # its text may be 1.5e-7
        mantissa, _, power = str(value).partition("e")
        return as_number(mantissa, int(power or 0))
    value = value.doit()
    return Fraction(value.p, value.q) if isinstance(value, Rational) else None
