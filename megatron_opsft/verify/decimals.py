"""Whether two numbers are equal: exact ones exactly, decimals as rounded ones."""

from decimal import Decimal
from fractions import Fraction

import sympy

from megatron_opsft.verify.formulas import with_real_roots
from megatron_opsft.verify.numerals import Number, as_number
from megatron_opsft.verify.values import exact

RELATIVE_TOLERANCE = Fraction(1, 10**6)
ROUNDED_DIGITS = 6  # a decimal with fewer is exact
FLOAT_NOISE = Fraction(1, 10**13)  # 0.1 + 0.2, as programs write it
_NOISE_DIGITS = 12  # of a decimal that may have it
_LARGEST = sympy.Float("1e200000", 30)  # digits of more would fill the memory
_COMPARED_DIGITS = 1000  # to which exact numbers must agree
_VANISHING = sympy.Float("1e-900", 30)


def same_number(left: Number, right: Number) -> bool:
    """Whether two numbers are equal. Exact numbers must be the same. A decimal of six or more
    significant digits may be rounded: it may be off by 1e-6 of its value, but by less than one in
    its last digit, and the other number must not be a shorter decimal.
    """
    one, other = Fraction(left), Fraction(right)
    difference, larger = abs(one - other), max(abs(one), abs(other))
    digits = max(_num_digits(left), _num_digits(right))
    if difference == 0 or (
        digits > _NOISE_DIGITS and difference <= FLOAT_NOISE * larger
    ):
        return True
    if digits < ROUNDED_DIGITS or _is_short(left) or _is_short(right):
        return False
    last_place = max(_last_place(left), _last_place(right))
    return difference < last_place and difference <= RELATIVE_TOLERANCE * larger


def same_values_of_numbers(gold: sympy.Expr, answer: sympy.Expr) -> bool:
    """Whether two expressions without letters are the same number."""
    numbers = [with_real_roots(exact(value).doit()) for value in (gold, answer)]
    if numbers[0] == numbers[1] and not numbers[0].has(sympy.nan, sympy.zoo):
        return True
    values = [sympy.N(value, 30) for value in numbers]
    if any(value is sympy.nan or value is sympy.zoo for value in values):
        return False
    if any(value.is_infinite for value in values):
        return values[0] == values[1]
    scale = max(abs(value) for value in values)
    difference = abs(values[0] - values[1])
    if not difference <= scale * sympy.Rational(RELATIVE_TOLERANCE) or scale > _LARGEST:
        return False
    left, right = _read(gold), _read(answer)
    if left is not None and right is not None:
        return same_number(left, right)
    decimal = right if left is None else left
    if isinstance(decimal, Decimal) and _num_digits(decimal) >= ROUNDED_DIGITS:
        margin = min(RELATIVE_TOLERANCE * abs(Fraction(decimal)), _last_place(decimal))
        return bool(difference <= sympy.Rational(*margin.as_integer_ratio()))
    rest = sympy.N(numbers[0] - numbers[1], 2, maxn=_COMPARED_DIGITS)
    return bool(abs(rest) <= scale * _VANISHING)


def _num_digits(number: Number) -> int:
    """How many digits of a decimal are significant."""
    return 0 if isinstance(number, Fraction) else len(number.as_tuple().digits)


def _last_place(number: Number) -> Fraction:
    """What the last digit of a decimal counts in."""
    if isinstance(number, Fraction):
        return Fraction(0)
    return Fraction(10) ** int(number.as_tuple().exponent)


def _is_short(number: Number) -> bool:
    """Whether a decimal of fewer than six digits, or a whole number, says it exactly."""
    if isinstance(number, Decimal):
        return _num_digits(number) < ROUNDED_DIGITS
    shifted = number * 10**100
    digits = str(abs(shifted.numerator)).rstrip("0")
    return number.denominator == 1 or (
        shifted.denominator == 1 and len(digits) < ROUNDED_DIGITS
    )


def _read(value: sympy.Expr) -> Number | None:
    """The number as it is written: a decimal, or a fraction; None for anything else."""
    if isinstance(value, sympy.Float):
        mantissa, _, power = str(value).partition("e")
        return as_number(mantissa, int(power or 0))
    value = value.doit()
    return Fraction(value.p, value.q) if isinstance(value, sympy.Rational) else None
