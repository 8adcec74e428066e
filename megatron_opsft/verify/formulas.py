"""Comparison of two formulas or relations by their values, with numbers for their letters.

Letters are positive numbers, so that logarithms and roots may be joined; where an absolute value or
the like is involved they are negative, too. A point where both formulas have no real value says
nothing, unless they hold the imaginary unit. Odd roots of negative numbers are real.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, starmap
from typing import Any

import sympy
from sympy import (
    Abs,
    Eq,
    Expr,
    FiniteSet,
    Float,
    Ge,
    Gt,
    Max,
    Min,
    Ne,
    Piecewise,
    Pow,
    Rational,
    Set,
    Symbol,
    Tuple,
)
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from megatron_opsft.verify.values import is_relation, relations_of

_NUMBERS = (
    "1.372",
    "0.618",
    "2.291",
    "3.057",
    "0.853",
    "1.914",
    "2.733",
    "0.477",
)
_DIGITS = 40  # of values at points
_NEARLY_ZERO = Float("1e-30", _DIGITS)
_NUM_POINTS = 3  # at which formulas must agree
_NUM_SIGNED_POINTS = 8
_NUM_SMALL_POINTS = 4  # for what has no value at larger ones: ln(1 - x)
_SIGN_MATTERS = (
    Abs,
    sympy.sign,
    Max,
    Min,
    sympy.floor,
    sympy.ceiling,
    Piecewise,
)


def same_formula(gold: Any, answer: Any) -> bool | None:
    """True if two formulas with letters agree; None if no point can tell."""
    pairs = _values_at_points(gold, answer)
    if pairs is None:
        return None
    return all(starmap(_is_close, pairs))


def same_relation(gold: Relational, answer: Relational) -> bool | None:
    """True if two relations are the same one in another form: one is the other times a constant,
    2x < 6 and x < 3. None if points cannot tell, as with relations without letters.
    """
    if not all(isinstance(side, Expr) for side in (*gold.args, *answer.args)):
        return None
    gold, answer = _without_greater(gold), _without_greater(answer)
    if gold.func is not answer.func:
        return False
    # 2x < 6 has 2x - 6, and x < 3 has x - 3: their quotient is 2 at every point.
    differences = Tuple(gold.lhs - gold.rhs, answer.lhs - answer.rhs)
    pairs = _values_at_points(*_without_functions(differences))
    if pairs is None:
        return None
    if _is_constant([gold_value for gold_value, _ in pairs]):  # such as x < x + 1
        return None
    if any(_is_close(value, 0) for value in chain(*pairs)):
        return None
    factors = [gold_value / answer_value for gold_value, answer_value in pairs]
    keeps_sign = gold.func in (Eq, Ne) or factors[0].is_positive
    return bool(keeps_sign) and _is_constant(factors)


def solution_set(value: Any) -> Any:
    """Return the set that a value describes, otherwise the value itself.

    `x in (1, 2)` describes (1, 2). Inequalities in one letter describe their real solutions, also
    chained (`1 < x < 2`) or joined by "or", which math-verify reads as a FiniteSet.
    """
    if isinstance(value, Eq) and isinstance(value.rhs, Set):
        return value.rhs
    alternatives = value.args if isinstance(value, FiniteSet) else (value,)
    if not all(map(is_relation, alternatives)):
        return value
    conditions = [sympy.And(*relations_of(relation)) for relation in alternatives]
    condition = _without_functions(sympy.Or(*conditions))
    if len(condition.free_symbols) != 1 or condition.has(Eq):
        return value
    try:
        numbers = condition.as_set()
    except Exception:  # sympy cannot solve it
        return value
    if numbers in (sympy.S.Reals, sympy.S.EmptySet):  # it says nothing: x < x + 1
        return value
    return numbers


def with_real_roots(value: Any) -> Any:
    """Return the value with odd roots of negative numbers as the real ones: the cube root of -8 is
    -2.
    """
    if not isinstance(value, Expr) or value.has(sympy.I):
        return value
    return value.replace(_is_odd_root, _real_root)


def _without_greater(relation: Relational) -> Relational:
    """Exchange the sides of > and >=, which become < and <=."""
    return relation.reversed if isinstance(relation, Gt | Ge) else relation


def _without_functions(value: Any) -> Any:
    """Replace each value of an unknown function, such as f(x), by a letter of its own."""
    letters = {
        function: Symbol(f"value of {function}", real=True)
        for function in value.atoms(AppliedUndef)
    }
    return value.xreplace(letters)


def _values_at_points(gold: Any, answer: Any) -> list[tuple[Any, Any]] | None:
    """Return pairs of the values of two formulas at some points; None if they cannot be computed.

    Points where neither value is real say little: they are added, at the end, only if fewer than
    two others are found.
    """
    if not (isinstance(gold, Expr) and isinstance(answer, Expr)):
        return None
    both = Tuple(gold, answer)
    letters = sorted(both.free_symbols, key=str)
    if not 0 < len(letters) <= len(_NUMBERS) or both.has(AppliedUndef):
        return None
    is_signed = both.has(*_SIGN_MATTERS)
    is_complex = both.has(sympy.I)
    num_points = _NUM_SIGNED_POINTS if is_signed else _NUM_POINTS
    defined = []
    undefined = []
    for point in _points(letters, num_points, is_signed):
        gold_value = _value_at(gold, point, is_complex)
        answer_value = _value_at(answer, point, is_complex)
        if gold_value is None or answer_value is None:
            return None
        if is_complex or _is_real(gold_value) or _is_real(answer_value):
            defined.append((gold_value, answer_value))
        else:
            undefined.append((gold_value, answer_value))
        if len(defined) == num_points:
            break
    return defined if len(defined) > 1 else defined + undefined


def _points(
    letters: Sequence[Symbol], num_points: int, is_signed: bool
) -> Iterator[dict[Any, Any]]:
    """Yield numbers for the letters, of both signs if `is_signed`: `num_points` larger ones, then
    small ones.
    """
    for point_number in range(num_points + _NUM_SMALL_POINTS):
        point = {}
        for index, letter in enumerate(letters):
            digits = _NUMBERS[(index + 3 * point_number) % len(_NUMBERS)]
            value = Float(digits, 2 * _DIGITS)
            if point_number < num_points:
                value += point_number % 3
            else:
                value /= 4 + point_number
            # Three bits of `point_number` are signs: eight points have all signs of three
            # letters. Later letters repeat them.
            sign_bit = index % 3
            if is_signed and point_number & (1 << sign_bit):
                value = -value
            point[letter] = value
        yield point


def _value_at(formula: Expr, point: dict[Any, Any], is_complex: bool) -> Any:
    """Compute a formula at a point; None if it has no finite value there."""
    formula = formula.xreplace(point)
    if not is_complex:
        formula = with_real_roots(formula)
    value = sympy.N(formula, _DIGITS)
    is_computed = value.is_Rational or value.has(Float)
    return value if value.is_number and value.is_finite and is_computed else None


def _is_real(number: Any) -> bool:
    """True if the imaginary part is 0, apart from rounding errors."""
    return bool(abs(sympy.im(number)) <= abs(number) * _NEARLY_ZERO)


def _is_close(left: Any, right: Any) -> bool:
    """True if two numbers are equal, apart from rounding errors."""
    scale = max(abs(left), abs(right), _NEARLY_ZERO)
    return bool(abs(left - right) <= scale * _NEARLY_ZERO)


def _is_constant(numbers: Sequence[Any]) -> bool:
    """True if all numbers are equal, apart from rounding errors."""
    return all(_is_close(numbers[0], number) for number in numbers[1:])


def _is_odd_root(value: Any) -> bool:
    """True for a negative number to a power p/q with an odd q, such as (-8)^(1/3)."""
    if not (isinstance(value, Pow) and isinstance(value.exp, Rational)):
        return False
    is_odd = value.exp.q > 1 and value.exp.q % 2 == 1
    return is_odd and value.base.is_number and bool(value.base.is_negative)


def _real_root(power: Pow) -> Any:
    """Return the real value of an odd root: (-8)^(1/3) is -2, (-8)^(2/3) is 4."""
    sign = -1 if power.exp.p % 2 else 1
    return sign * Pow(-power.base, power.exp)
