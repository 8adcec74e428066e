"""Whether two values that math-verify has read are equal: exact ones exactly, decimals as rounded.

Numbers, and numbers inside tuples, sets, intervals and matrices, are compared here, formulas first
at some points; math-verify judges everything else, and only ever sees exact numbers.
"""

from collections.abc import Iterable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import sympy
from latex2sympy2_extended.logic import And
from math_verify import verify
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from megatron_opsft.verify.reading import Number, as_number

RELATIVE_TOLERANCE = Fraction(1, 10**6)
ROUNDED_DIGITS = 6  # a decimal with fewer is exact
FLOAT_NOISE = Fraction(1, 10**13)  # 0.1 + 0.2, as programs write it
_LARGEST = sympy.Float("1e200000", 30)  # digits of more would fill the memory
_NEARLY_ZERO = sympy.Float("1e-25", 30)
_POINTS = ("1.372", "0.618", "2.291", "3.057", "0.853", "1.914", "2.733", "0.477")
_APART = ({"between", "numbers"}, {"between", "named"}, {"pair", "named"})  # see `_kind`
_SIGNED = (sympy.Abs, sympy.sign, sympy.Max, sympy.Min, sympy.floor, sympy.ceiling, sympy.Piecewise)


def same_number(left: Number, right: Number) -> bool:
    """Whether two numbers are equal. Exact numbers must be the same. A decimal of six or more
    significant digits may be rounded: it may be off by 1e-6 of its value, but by less than one in
    its last digit, and the other number must not be a shorter decimal.
    """
    one, other = Fraction(left), Fraction(right)
    difference, larger = abs(one - other), max(abs(one), abs(other))
    digits = max(_written(left)[0], _written(right)[0])
    last = max(_written(left)[1], _written(right)[1])
    if difference == 0 or (digits > 12 and difference <= FLOAT_NOISE * larger):
        return True
    if digits < ROUNDED_DIGITS or _is_short(left) or _is_short(right):
        return False
    return difference < last and difference <= RELATIVE_TOLERANCE * larger


def _written(number: Number) -> tuple[int, Fraction]:
    """How many digits of a decimal are significant, and what its last one counts in."""
    if isinstance(number, Fraction):
        return 0, Fraction(0)
    _, digits, power = number.as_tuple()
    return len(digits), Fraction(10) ** int(power)


def _is_short(number: Number) -> bool:
    """Whether a decimal of fewer than six digits, or a whole number, says it exactly."""
    if isinstance(number, Decimal):
        return _written(number)[0] < ROUNDED_DIGITS
    shifted = number * 10**100
    digits = str(abs(shifted.numerator)).rstrip("0")
    return number.denominator == 1 or (shifted.denominator == 1 and len(digits) < ROUNDED_DIGITS)


def same_value(gold: Any, answer: Any) -> bool:
    """Whether two values, as math-verify's `parse` gives them, are equal."""
    if {_kind(gold), _kind(answer)} in _APART:
        return False
    gold, answer = map(_cleaned, _unwrap(gold, answer))
    numbers = _single(gold), _single(answer)
    if all(map(_is_number, numbers)):
        return _same_numbers(*numbers)
    same = _same_members(gold, answer)
    if same is None:
        gold, answer = _exact(_as_set(gold)), _exact(_as_set(answer))
        same = _same_at_points(gold, answer)
    if same is None:
        limits = {"numeric_precision": 40, "timeout_seconds": None}
        same = bool(verify(gold, answer, allow_set_relation_comp=True, **limits))
    return same


def _unwrap(gold: Any, answer: Any) -> tuple[Any, Any]:
    """Without `x =` where both have the same, or one side alone: a gold equation is more than its
    right side, but for one that names what is asked for.
    """
    left, right = _assigned(gold), _assigned(answer)
    if left and right and all(map(_is_number, (*left, *right))):  # 2 + 3 = 5, if it holds
        holds = _same_numbers(*map(_cleaned, right))
        return left[1], right[1] if holds else sympy.nan
    if left and right:
        return (left[1], right[1]) if left[0] == right[0] and _is_name(left[0]) else (gold, answer)
    computed = left and all(map(_is_number, left))
    if left and (computed or _is_name(left[0])) and not isinstance(answer, Relational | And):
        return left[1], answer
    if right and not isinstance(gold, Relational | And):
        return gold, right[1]
    return gold, answer


def _assigned(value: Any) -> tuple[Any, Any] | None:
    """(what, value) of `x = 5`, `x + y = 5` and `f(2) = 2 + 3 = 5`."""
    parts = value._unsorted_args if isinstance(value, And) else (value,)
    if not all(isinstance(part, sympy.Eq) for part in parts):
        return None
    left, right = parts[0].lhs, parts[-1].rhs
    return (right, left) if _is_name(right) and not _is_name(left) else (left, right)


def _kind(value: Any) -> str:
    """Numbers `between` bounds (1 < x < 2), some `numbers` (1, 2), those of a name (`named`: x = 1
    or x = 2); `each`: x = 1, y = 2; `pair`: (1, 2), perhaps an interval. "": anything else.
    """
    match value:
        case sympy.Eq(rhs=sympy.Interval() | sympy.Union()):
            return "between"
        case sympy.Eq(rhs=sympy.FiniteSet()):
            return "named"
        case Relational() | And():
            return "" if _assigned(value) else "between"
        case sympy.FiniteSet() if all(isinstance(one, sympy.Expr) for one in value.args):
            return "numbers"
        case sympy.FiniteSet() if all(isinstance(one, sympy.Eq) for one in value.args):
            names = {one.lhs for one in value.args}
            return "named" if len(names) == 1 else "each" if len(names) == len(value.args) else ""
    return "pair" if isinstance(value, sympy.Interval) else ""


def _is_name(value: Any) -> bool:
    """x, f(x), AB and (x, y), which math-verify takes for an interval."""
    if isinstance(value, sympy.Interval | sympy.Tuple | sympy.Mul):
        parts = _ends(value) if isinstance(value, sympy.Interval) else value.args
        return all(isinstance(part, sympy.Symbol) for part in parts)
    return isinstance(value, sympy.Symbol | AppliedUndef)


def _is_number(value: Any) -> bool:
    return isinstance(value, sympy.Expr) and bool(value.is_number)


def _single(value: Any) -> Any:
    """Of a set that holds one value, perhaps twice (1/2 or 0.5), that value."""
    if isinstance(value, sympy.FiniteSet) and value.args:
        first, *others = value.args
        if all(same_value(first, other) for other in others):
            return first
    return value


def _same_numbers(gold: sympy.Expr, answer: sympy.Expr) -> bool:
    exact = [_exact(value) for value in (gold, answer)]
    values = [sympy.N(value, 30) for value in exact]
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
    if isinstance(decimal, Decimal):
        digits, last = _written(decimal)
        margin = min(RELATIVE_TOLERANCE * abs(Fraction(decimal)), last)
        if digits >= ROUNDED_DIGITS:
            return bool(difference <= sympy.Rational(*margin.as_integer_ratio()))
    return bool(abs(sympy.N(exact[0] - exact[1], 30)) <= scale * _NEARLY_ZERO)


def _read(value: sympy.Expr) -> Number | None:
    if isinstance(value, sympy.Float):
        mantissa, _, power = str(value).partition("e")
        return as_number(mantissa, int(power or 0))
    value = value.doit()
    return Fraction(value.p, value.q) if isinstance(value, sympy.Rational) else None


def _exact(value: Any) -> Any:
    """With every decimal as the fraction that it says."""
    if not isinstance(value, sympy.Basic | sympy.MatrixBase):
        return value
    if isinstance(value, sympy.Eq) and isinstance(value.rhs, sympy.Set):  # else it becomes "false"
        return sympy.Eq(value.lhs, _exact(value.rhs), evaluate=False)
    return value.xreplace({one: sympy.Rational(str(one)) for one in value.atoms(sympy.Float)})


def _cleaned(value: Any) -> Any:
    """With i as the imaginary unit, all other letters real, and per cent as a factor: math-verify
    reads each letter of a complex number as one that is not real. Equations in a set wait until
    their names are gone: for a real x, x = 2i would be "false".
    """
    if not isinstance(value, sympy.Basic | sympy.MatrixBase) or _kind(value) == "named":
        return value
    letters = {
        letter: sympy.I if letter.name == "i" else sympy.Symbol(letter.name, real=True)
        for letter in value.free_symbols
        if letter.name == "i" or letter.is_real is False
    }
    value = value.xreplace(letters)
    per_cent = value.has(sympy.UnevaluatedExpr)
    return value.replace(sympy.UnevaluatedExpr, lambda inner: inner) if per_cent else value


def _as_set(value: Any) -> Any:
    """`x < 1 or x > 3` as the set that it describes."""
    relations = value.args if isinstance(value, sympy.FiniteSet) else ()
    if len(relations) < 2 or not all(isinstance(one, Relational | And) for one in relations):
        return value
    conditions = [sympy.And(*one.args) if isinstance(one, And) else one for one in relations]
    try:
        return sympy.Union(*(condition.as_set() for condition in conditions))
    except Exception:  # relations of several letters describe no set of numbers
        return value


def _same_members(gold: Any, answer: Any) -> bool | None:
    """Two collections member by member; None where they are not such a pair."""
    left, right = _ordered(gold), _ordered(answer)
    match gold, answer:
        case sympy.MatrixBase(), sympy.MatrixBase():
            return gold.shape == answer.shape and _all_same(gold.flat(), answer.flat())
        case sympy.Interval(), sympy.Interval():
            closed = [(one.left_open, one.right_open) for one in (gold, answer)]
            return closed[0] == closed[1] and _all_same(_ends(gold), _ends(answer))
        case sympy.FiniteSet(), sympy.FiniteSet() if (left is None) == (right is None):
            members = _written_members(gold), _written_members(answer)  # 3, 3, 5 is not 3, 5, 5
            as_lists = len(members[0]) == len(members[1])
            return _same_sets(*(members if as_lists else (gold.args, answer.args)))
        case _, sympy.FiniteSet() if left is not None:  # 1, 2 for (1, 2) and for x = 1, y = 2
            return _all_same(left, right or _written_members(answer))
        case sympy.FiniteSet(), _ if left is None and right and len(gold.args) == len(right):
            return _same_sets(gold.args, right)
    return None if left is None or right is None else _all_same(left, right)


def _ordered(value: Any) -> Sequence[Any] | None:
    """The members, in order, of a tuple, a vector, (a, b) (perhaps an interval), x = 2, y = 3."""
    match value:
        case sympy.FiniteSet() if _kind(value) == "each":
            members = _written_members(value)
            in_order = {str(one.lhs) for one in members} <= {*"xyz"}
            return [one.rhs for one in (sorted(members, key=str) if in_order else members)]
        case sympy.Tuple():
            return value.args
        case sympy.Interval(left_open=sympy.true, right_open=sympy.true):
            return _ends(value)
        case sympy.MatrixBase() if 1 in value.shape:
            return value.flat()
    return None


def _written_members(value: sympy.FiniteSet) -> Sequence[Any]:
    return getattr(value, "_unsorted_args", value.args)


def _ends(interval: sympy.Interval) -> Sequence[Any]:
    return interval.start, interval.end


def _all_same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(map(same_value, left, right))


def _same_sets(left: Sequence[Any], right: Iterable[Any]) -> bool:
    """Each of the one has a partner in the other."""
    others = list(right)
    for value in left:
        partner = next((i for i, other in enumerate(others) if same_value(value, other)), None)
        if partner is None:
            return False
        del others[partner]
    return not others


def _same_at_points(gold: Any, answer: Any) -> bool | None:
    """Whether two formulas agree where every letter is a positive number; None where that says
    nothing, as with absolute values, or cannot be computed.
    """
    pair = (gold, answer)
    if not all(isinstance(value, sympy.Expr) for value in pair):
        return None
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    if not 0 < len(symbols) <= len(_POINTS) or any(v.has(*_SIGNED, AppliedUndef) for v in pair):
        return None
    for shift in range(3):
        point = {
            symbol: sympy.Float(_POINTS[(index + 3 * shift) % len(_POINTS)], 60) + shift
            for index, symbol in enumerate(symbols)
        }
        values = [sympy.N(value.xreplace(point), 30) for value in pair]
        if not all(
            value.is_number and value.is_finite and (value.is_Rational or value.has(sympy.Float))
            for value in values
        ):
            return None
        scale = max(abs(value) for value in values)
        if not abs(values[0] - values[1]) <= scale * _NEARLY_ZERO:
            return False
    return True
