"""Building blocks of the values of answers: chains of relations, sets, letters, decimals."""

from collections.abc import Sequence
from typing import Any

from latex2sympy2_extended.logic import And
from sympy import (
    Basic,
    Expr,
    FiniteSet,
    Float,
    I,
    Interval,
    MatrixBase,
    Rational,
    Symbol,
    Tuple,
    UnevaluatedExpr,
)
from sympy.core.relational import Relational


def written_members(value: FiniteSet | And) -> Sequence[Any]:
    """Return the members of a set, or the relations of a chain, in the order in which they are
    written; sympy sorts `args`.
    """
    return getattr(value, "_unsorted_args", value.args)


def relations_of(value: Any) -> Sequence[Any]:
    """Return the relations of a chain such as 1 < x < 2 in their order; () for anything else."""
    if isinstance(value, And):
        return written_members(value)
    if isinstance(value, Relational):
        return (value,)
    return ()


def is_relation(value: Any) -> bool:
    """True for a relation, x < 2, or a chain of them, 1 < x < 2."""
    return isinstance(value, Relational | And)


def is_number(value: Any) -> bool:
    """True for a formula without letters, such as 2 or sqrt(2) + 1."""
    return isinstance(value, Expr) and bool(value.is_number)


def ends_of(interval: Interval) -> Sequence[Any]:
    """Return the two ends of an interval."""
    return interval.start, interval.end


def exact(value: Any) -> Any:
    """Return the value with every decimal as the fraction that its digits say."""
    if not isinstance(value, Basic | MatrixBase):
        return value
    fractions = {decimal: Rational(str(decimal)) for decimal in value.atoms(Float)}
    return replaced(value, fractions)


def cleaned(value: Any) -> Any:
    """Return the value with i as the imaginary unit, all other letters real, and per cent as a
    factor. Beside an i the parser declares all letters to be non-real.
    """
    if not isinstance(value, Basic | MatrixBase):
        return value
    letters = {}
    for letter in value.free_symbols:
        if letter.name == "i":
            letters[letter] = I
        elif letter.is_real is False:
            letters[letter] = Symbol(letter.name, real=True)
    value = replaced(value, letters)
    if value.has(UnevaluatedExpr):  # the parser's form of per cent
        return value.replace(UnevaluatedExpr, lambda inner: inner)
    return value


def replaced(value: Any, replacements: dict[Any, Any]) -> Any:
    """Return the value with atoms replaced. A relation stays one, even if it becomes true or false,
    and members stay in the order in which they are written.
    """
    if not replacements:
        return value
    if isinstance(value, Relational):
        sides = [replaced(side, replacements) for side in value.args]
        return value.func(*sides, evaluate=False)
    if isinstance(value, And | FiniteSet):
        members = [replaced(member, replacements) for member in written_members(value)]
        return value.func(*members)
    if isinstance(value, Interval):
        ends = [replaced(end, replacements) for end in ends_of(value)]
        if not all(end.is_extended_real for end in ends):  # (2, i) is a pair
            return Tuple(*ends)
        return Interval(*ends, value.left_open, value.right_open)
    return value.xreplace(replacements)
