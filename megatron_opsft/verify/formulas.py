"""Comparison of two formulas or relations by their values, with numbers for their letters.

Letters are positive numbers, so that logarithms and roots may be joined; where an absolute value or
the like is involved they are negative, too. A point where both formulas have no real value says
nothing, unless they hold the imaginary unit. Odd roots of negative numbers are real.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import sympy
from latex2sympy2_extended.logic import And
from sympy import (
    Abs,
    Eq,
    Expr,
    FiniteSet,
    Float,
    Ge,
    Gt,
    Le,
    Lt,
    Max,
    Min,
    Ne,
    Piecewise,
    Pow,
    Rational,
    Set,
    Symbol,
)
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

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
_TURNED = {Gt: Lt, Ge: Le}


def same_formula(gold: Any, answer: Any) -> bool | None:
    """True if two formulas with letters agree; None if no point can tell."""
    pairs = _values_at_points(gold, answer)
    if pairs is None:
        return None
    return all(
        _is_close(gold_value, answer_value) for gold_value, answer_value in pairs
    )


def same_relation(gold: Relational, answer: Relational) -> bool | None:
    """True if two relations are the same one in another form: one is the other times a constant,
    2x < 6 and x < 3. None if points cannot tell, as with relations without letters.
    """
    gold_form, answer_form = _as_difference(gold), _as_difference(answer)
    if gold_form is None or answer_form is None:
        return None
    if gold_form.sign is not answer_form.sign:
        return False
    pairs = _values_at_points(
        *_without_functions([gold_form.difference, answer_form.difference])
    )
    if pairs is None:
        return None
    if _is_constant([gold_value for gold_value, _ in pairs]):  # such as x < x + 1
        return None
    if any(_is_close(left, 0) or _is_close(right, 0) for left, right in pairs):
        return None
    factors = [gold_value / answer_value for gold_value, answer_value in pairs]
    keeps_sign = gold_form.sign in (Eq, Ne) or factors[0].is_positive
    return bool(keeps_sign) and _is_constant(factors)


def solution_set(value: Any) -> Any:
    """Return the set that a value describes, otherwise the value itself.

    `x in (1, 2)` describes (1, 2). Inequalities in one letter describe their real solutions, also
    chained (`1 < x < 2`) or joined by "or", which math-verify reads as a FiniteSet.
    """
    if isinstance(value, Eq) and isinstance(value.rhs, Set):
        return value.rhs
    alternatives = value.args if isinstance(value, FiniteSet) else (value,)
    if not all(isinstance(relation, Relational | And) for relation in alternatives):
        return value
    conditions = [sympy.And(*_conjuncts(relation)) for relation in alternatives]
    (condition,) = _without_functions([sympy.Or(*conditions)])
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


def _conjuncts(relation: Any) -> Sequence[Any]:
    return relation.args if isinstance(relation, And) else (relation,)


class _Difference(NamedTuple):
    """A relation with zero on its right."""

    sign: type[Relational]
    """The relation between `difference` and zero: never > or >=."""
    difference: Any


def _as_difference(relation: Relational) -> _Difference | None:
    """Move all to the left side, and turn > and >= to < and <=; None if a side is no formula."""
    if not all(isinstance(side, Expr) for side in relation.args):
        return None
    difference = relation.lhs - relation.rhs
    if turned := _TURNED.get(relation.func):
        return _Difference(turned, -difference)
    return _Difference(relation.func, difference)


def _without_functions(values: Sequence[Any]) -> list[Any]:
    """Replace each value of an unknown function, such as f(x), by a letter of its own."""
    applied = set().union(*(value.atoms(AppliedUndef) for value in values))
    letters = {
        function: Symbol(f"value of {function}", real=True) for function in applied
    }
    return [value.xreplace(letters) for value in values]


def _values_at_points(gold: Any, answer: Any) -> list[tuple[Any, Any]] | None:
    """Return pairs of the values of two formulas at some points; None if they cannot be computed.

    Points where neither value is real say little: they are added, at the end, only if fewer than
    two others are found.
    """
    pair = (gold, answer)
    if not all(isinstance(formula, Expr) for formula in pair):
        return None
    letters = sorted(gold.free_symbols | answer.free_symbols, key=str)
    if not 0 < len(letters) <= len(_NUMBERS):
        return None
    if any(formula.has(AppliedUndef) for formula in pair):
        return None
    is_signed = any(formula.has(*_SIGN_MATTERS) for formula in pair)
    is_complex = any(formula.has(sympy.I) for formula in pair)
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
    for number in range(num_points + _NUM_SMALL_POINTS):
        point = {}
        for index, letter in enumerate(letters):
            digits = _NUMBERS[(index + 3 * number) % len(_NUMBERS)]
            value = Float(digits, 2 * _DIGITS)
            value = value + number % 3 if number < num_points else value / (4 + number)
            # The bits of the point's number are the signs of its first three letters.
            if is_signed and (number >> index % 3) % 2:
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
    return bool(abs(sympy.im(number)) <= abs(number) * _NEARLY_ZERO)


def _is_close(left: Any, right: Any) -> bool:
    scale = max(abs(left), abs(right), _NEARLY_ZERO)
    return bool(abs(left - right) <= scale * _NEARLY_ZERO)


def _is_constant(numbers: Sequence[Any]) -> bool:
    return all(_is_close(numbers[0], number) for number in numbers[1:])


def _is_odd_root(value: Any) -> bool:
    if not (isinstance(value, Pow) and isinstance(value.exp, Rational)):
        return False
    is_odd = value.exp.q > 1 and value.exp.q % 2 == 1
    return is_odd and value.base.is_number and bool(value.base.is_negative)


def _real_root(power: Pow) -> Any:
    sign = -1 if power.exp.p % 2 else 1
    return sign * Pow(-power.base, power.exp)
