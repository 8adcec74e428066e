"""What an equation names, and the value without its name: x = 5, f(x) = x^2, 2 + 3 = 5."""

import re
from collections.abc import Sequence
from typing import Any

import sympy
from sympy.core.function import AppliedUndef

from megatron_opsft.verify.decimals import same_values_of_numbers
from megatron_opsft.verify.values import (
    cleaned,
    ends_of,
    is_number,
    is_relation,
    relations_of,
    replaced,
    written_members,
)

_FUNCTION_NAME = re.compile(
    r"[a-zA-Z](?:_\S+)?|\\text\{[a-zA-Z](?:prime)+\}"
)  # f, f_1, f'


def with_same_arguments(gold: Any, answer: Any) -> tuple[Any, Any]:
    """Both with the same letters for a function's arguments: f(t) = t^2 is f(x) = x^2. Also in
    lists of such equations for one function.
    """
    functions = _named_function(gold), _named_function(answer)
    if functions[0] is None or functions[1] is None:
        return gold, answer
    letters = [function.args for function in functions]
    if functions[0].func != functions[1].func or len(letters[0]) != len(letters[1]):
        return gold, answer
    if not all(map(_are_arguments, letters)):
        return gold, answer
    bound = [
        sympy.Symbol(f"argument {number}", real=True)
        for number in range(len(letters[0]))
    ]
    renamed = [dict(zip(one, bound, strict=True)) for one in letters]
    return replaced(gold, renamed[0]), replaced(answer, renamed[1])


def _named_function(value: Any) -> Any:
    """f(x) of f(x) = x^2, and of a list of such equations for it alone; None for anything else."""
    equations = (
        written_members(value) if isinstance(value, sympy.FiniteSet) else [value]
    )
    if not equations or not all(isinstance(one, sympy.Eq) for one in equations):
        return None
    named = {one.lhs for one in equations}
    function = named.pop()
    if named or not isinstance(function, AppliedUndef):
        return None
    return function if _FUNCTION_NAME.fullmatch(str(function.func)) else None


def _are_arguments(values: Sequence[Any]) -> bool:
    """Whether they are different small letters; capital ones are events and matrices: P(A)."""
    names = [one.name for one in values if isinstance(one, sympy.Symbol)]
    return len(set(names)) == len(values) and all(name.islower() for name in names)


def without_names(gold: Any, answer: Any) -> tuple[Any, Any]:
    """Drop `x =` if both sides have it, or if only one side does and it just names the value. A
    chain such as 2 + 3 = 5 is its last number if it holds, and else no number.
    """
    left, right = assigned(gold), assigned(answer)
    if left and right and all(map(is_number, (*left, *right))):
        return (
            (left[1], right[1]) if _holds(gold) and _holds(answer) else (gold, answer)
        )
    if left and right:
        has_same_name = left[0] == right[0] and _is_name(left[0])
        return (left[1], right[1]) if has_same_name else (gold, answer)
    if left and not is_relation(answer) and _holds(gold):
        names_value = _is_name(left[0]) or all(map(is_number, left))
        return (left[1], answer) if names_value else (gold, answer)
    if right and not is_relation(gold) and _holds(answer):
        return gold, right[1]
    return gold, answer


def assigned(value: Any) -> tuple[Any, Any] | None:
    """(what, value) of `x = 5`, `x + y = 5` and `f(2) = 2 + 3 = 5`."""
    parts = relations_of(value)
    if not parts or not all(isinstance(part, sympy.Eq) for part in parts):
        return None
    left, right = parts[0].lhs, parts[-1].rhs
    return (right, left) if _is_name(right) and not _is_name(left) else (left, right)


def _holds(chain: Any) -> bool:
    """Whether neighbours in a chain of equations that are numbers are the same number."""
    for part in relations_of(chain):
        sides = [cleaned(side) for side in part.args]
        if all(map(is_number, sides)) and not same_values_of_numbers(*sides):
            return False
    return True


def _is_name(value: Any) -> bool:
    """Letters without numbers: x, f(x), AB, |AB|, a + b and (x, y), perhaps read as an interval."""
    if isinstance(value, sympy.Interval | sympy.Tuple):
        parts = ends_of(value) if isinstance(value, sympy.Interval) else value.args
        return all(isinstance(part, sympy.Symbol) for part in parts)
    if isinstance(value, AppliedUndef):
        return True
    if not isinstance(value, sympy.Expr):
        return False
    return all(isinstance(atom, sympy.Symbol) or atom == -1 for atom in value.atoms())
