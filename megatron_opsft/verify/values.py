"""What the values of answers are made of: relations in chains, letters, decimals."""

from collections.abc import Sequence
from typing import Any

import sympy
from latex2sympy2_extended.logic import And
from sympy.core.relational import Relational


def relations_of(value: Any) -> Sequence[Any]:
    """The relations of a chain such as 1 < x < 2 in their order; () for anything else."""
    if isinstance(value, And):
        return getattr(value, "_unsorted_args", value.args)
    return (value,) if isinstance(value, Relational) else ()


def is_relation(value: Any) -> bool:
    return isinstance(value, Relational | And)


def is_number(value: Any) -> bool:
    return isinstance(value, sympy.Expr) and bool(value.is_number)


def ends_of(interval: sympy.Interval) -> Sequence[Any]:
    return interval.start, interval.end


def exact(value: Any) -> Any:
    """The value with every decimal as the fraction that it says."""
    if not isinstance(value, sympy.Basic | sympy.MatrixBase):
        return value
    return replaced(
        value, {one: sympy.Rational(str(one)) for one in value.atoms(sympy.Float)}
    )


def cleaned(value: Any) -> Any:
    """The value with i as the imaginary unit, all other letters real, and per cent as a factor: the
    parser reads each letter of a complex number as one that is not real.
    """
    if not isinstance(value, sympy.Basic | sympy.MatrixBase):
        return value
    letters = {
        letter: sympy.I if letter.name == "i" else sympy.Symbol(letter.name, real=True)
        for letter in value.free_symbols
        if letter.name == "i" or letter.is_real is False
    }
    value = replaced(value, letters)
    per_cent = value.has(sympy.UnevaluatedExpr)
    return (
        value.replace(sympy.UnevaluatedExpr, lambda inner: inner) if per_cent else value
    )


def replaced(value: Any, replacements: dict[Any, Any]) -> Any:
    """The value with atoms replaced; a relation stays one, even if it becomes true or false, and
    members stay in the order in which they are written.
    """
    if not replacements:
        return value
    if isinstance(value, Relational):
        sides = [replaced(side, replacements) for side in value.args]
        return value.func(*sides, evaluate=False)
    if isinstance(value, And):
        return And(*(replaced(part, replacements) for part in relations_of(value)))
    if isinstance(value, sympy.FiniteSet):
        return value.func(
            *(replaced(one, replacements) for one in written_members(value))
        )
    if isinstance(value, sympy.Interval):
        ends = [replaced(end, replacements) for end in ends_of(value)]
        if not all(end.is_extended_real for end in ends):  # (2, i) is a pair
            return sympy.Tuple(*ends)
        return sympy.Interval(*ends, value.left_open, value.right_open)
    return value.xreplace(replacements)


def written_members(value: sympy.FiniteSet) -> Sequence[Any]:
    return getattr(value, "_unsorted_args", value.args)
