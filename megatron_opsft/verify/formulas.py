"""Whether two formulas or two relations say the same, compared where their letters are numbers.

Letters are positive numbers, so that logarithms and roots may be joined; where an absolute value or
the like is involved they are negative, too. A point where both formulas have no real value says
nothing, unless they hold the imaginary unit. Odd roots of negative numbers are real.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import sympy
from latex2sympy2_extended.logic import And
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

_NUMBERS = ("1.372", "0.618", "2.291", "3.057", "0.853", "1.914", "2.733", "0.477")
_DIGITS = 40  # of values at points
_NEARLY_ZERO = sympy.Float("1e-30", _DIGITS)
_NUM_POINTS = 3  # at which formulas must agree
_NUM_SIGNED_POINTS = 8
_NUM_SMALL_POINTS = 4  # for what has no value at larger ones: ln(1 - x)
_SIGNED = (
    sympy.Abs,
    sympy.sign,
    sympy.Max,
    sympy.Min,
    sympy.floor,
    sympy.ceiling,
    sympy.Piecewise,
)
_TURNED = {sympy.Gt: sympy.Lt, sympy.Ge: sympy.Le}

Pair = Sequence[Any]


def same_formula(gold: Any, answer: Any) -> bool | None:
    """Whether two formulas with letters agree; None where points say nothing about them."""
    values = _values_at_points((gold, answer))
    return None if values is None else all(_is_close(*pair) for pair in values)


def same_relation(gold: Relational, answer: Relational) -> bool | None:
    """Whether two relations are the same one in another form: one is the other times a constant,
    2x < 6 and x < 3. None where that says nothing, as with relations without letters.
    """
    left, right = _as_difference(gold), _as_difference(answer)
    if left is None or right is None:
        return None
    if left.sign is not right.sign:
        return False
    values = _values_at_points(_without_functions((left.difference, right.difference)))
    if values is None or _is_constant(one for one, _ in values):  # such as x < x + 1
        return None
    if any(_is_close(one, 0) or _is_close(other, 0) for one, other in values):
        return None
    factors = [one / other for one, other in values]
    keeps_sign = left.sign in (sympy.Eq, sympy.Ne) or factors[0].is_positive
    return bool(keeps_sign) and _is_constant(factors)


def solution_set(value: Any) -> Any:
    """The real numbers that a relation for one letter, a chain of such, or several joined by "or"
    describe; the set in x in (1, 2). Anything else stays as it is.
    """
    if isinstance(value, sympy.Eq) and isinstance(value.rhs, sympy.Set):
        return value.rhs
    relations = value.args if isinstance(value, sympy.FiniteSet) else (value,)
    if not all(isinstance(one, Relational | And) for one in relations):
        return value
    relations = [sympy.And(*_parts(one)) for one in relations]
    (joined,) = _without_functions((sympy.Or(*relations),))
    if len(joined.free_symbols) != 1 or joined.has(sympy.Eq):
        return value
    try:
        described = joined.as_set()
    except Exception:  # sympy cannot solve it
        return value
    is_always_the_same = described in (
        sympy.S.Reals,
        sympy.S.EmptySet,
    )  # as with x < x + 1
    return value if is_always_the_same else described


def with_real_roots(value: Any) -> Any:
    """The value with odd roots of negative numbers as the real ones: the cube root of -8 is -2."""
    if not isinstance(value, sympy.Expr) or value.has(sympy.I):
        return value
    return value.replace(_is_odd_root, _real_root)


def _parts(relation: Any) -> Sequence[Any]:
    return relation.args if isinstance(relation, And) else (relation,)


class _Difference(NamedTuple):
    sign: type[Relational]  # between `difference` and zero
    difference: Any


def _as_difference(relation: Relational) -> _Difference | None:
    """The relation with zero on its right, and < or <= for > and >=."""
    if not all(isinstance(side, sympy.Expr) for side in relation.args):
        return None
    difference = relation.lhs - relation.rhs
    turned = _TURNED.get(relation.func)
    return (
        _Difference(turned, -difference)
        if turned
        else _Difference(relation.func, difference)
    )


def _without_functions(values: Sequence[Any]) -> list[Any]:
    """Each value of an unknown function as a letter of its own."""
    applied = set().union(*(value.atoms(AppliedUndef) for value in values))
    names = {one: sympy.Symbol(f"value of {one}", real=True) for one in applied}
    return [value.xreplace(names) for value in values]


def _values_at_points(pair: Pair) -> list[Pair] | None:
    """What two formulas are at some points; None where they cannot be computed."""
    if not all(isinstance(value, sympy.Expr) for value in pair):
        return None
    letters = sorted(pair[0].free_symbols | pair[1].free_symbols, key=str)
    if not 0 < len(letters) <= len(_NUMBERS) or any(
        value.has(AppliedUndef) for value in pair
    ):
        return None
    is_signed = any(value.has(*_SIGNED) for value in pair)
    is_complex = any(value.has(sympy.I) for value in pair)
    defined: list[Pair] = []
    undefined: list[Pair] = []
    for point in _points(letters, is_signed):
        values = (
            _numeric(pair[0], point, is_complex),
            _numeric(pair[1], point, is_complex),
        )
        if values[0] is None or values[1] is None:
            return None
        has_value = is_complex or any(_is_real(value) for value in values)
        (defined if has_value else undefined).append(values)
        if len(defined) == (_NUM_SIGNED_POINTS if is_signed else _NUM_POINTS):
            break
    return defined if len(defined) > 1 else defined + undefined


def _points(
    letters: Sequence[sympy.Symbol], is_signed: bool
) -> Iterator[dict[Any, Any]]:
    """Numbers for the letters; of both signs where signs matter."""
    count = _NUM_SIGNED_POINTS if is_signed else _NUM_POINTS
    for number in range(count + _NUM_SMALL_POINTS):
        point = {}
        for index, letter in enumerate(letters):
            value = sympy.Float(
                _NUMBERS[(index + 3 * number) % len(_NUMBERS)], 2 * _DIGITS
            )
            value = value + number % 3 if number < count else value / (4 + number)
            is_negative = is_signed and (number >> index % 3) % 2
            point[letter] = -value if is_negative else value
        yield point


def _numeric(value: sympy.Expr, point: dict[Any, Any], is_complex: bool) -> Any:
    """The value at a point; None where it cannot be computed."""
    value = value.xreplace(point)
    if not is_complex:
        value = with_real_roots(value)
    number = sympy.N(value, _DIGITS)
    is_computed = number.is_Rational or number.has(sympy.Float)
    return number if number.is_number and number.is_finite and is_computed else None


def _is_real(number: Any) -> bool:
    return bool(abs(sympy.im(number)) <= abs(number) * _NEARLY_ZERO)


def _is_close(one: Any, other: Any) -> bool:
    scale = max(abs(one), abs(other), _NEARLY_ZERO)
    return bool(abs(one - other) <= scale * _NEARLY_ZERO)


def _is_constant(numbers: Iterable[Any]) -> bool:
    first, *others = numbers
    return all(_is_close(first, other) for other in others)


def _is_odd_root(value: Any) -> bool:
    if not (isinstance(value, sympy.Pow) and isinstance(value.exp, sympy.Rational)):
        return False
    is_odd = value.exp.q > 1 and value.exp.q % 2 == 1
    return is_odd and value.base.is_number and bool(value.base.is_negative)


def _real_root(power: sympy.Pow) -> Any:
    sign = -1 if power.exp.p % 2 else 1
    return sign * sympy.Pow(-power.base, power.exp)
