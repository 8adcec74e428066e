"""The name in an equation, and the value without it: x = 5, f(x) = x^2, 2 + 3 = 5."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from sympy import Eq, Expr, FiniteSet, Interval, Symbol, Tuple
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

_FUNCTION_NAME = re.compile(  # f, f_1, f'
    r"[a-zA-Z](?:_\S+)?|\\text\{[a-zA-Z](?:prime)+\}"
)


class Assignment(NamedTuple):
    """An equation read as a name and its value: x and 5 of x = 5; of 2 + 3 = 5 both are numbers."""

    name: Any
    value: Any

    @property
    def is_of_numbers(self) -> bool:
        return is_number(self.name) and is_number(self.value)


def with_same_arguments(gold: Any, answer: Any) -> tuple[Any, Any]:
    """Return both with the same letters for a function's arguments: f(t) = t^2 is f(x) = x^2. Also
    in lists of such equations for one function.
    """
    gold_function = _defined_function(gold)
    answer_function = _defined_function(answer)
    if gold_function is None or answer_function is None:
        return gold, answer
    old, new = gold_function.args, answer_function.args
    if gold_function.func != answer_function.func or len(old) != len(new):
        return gold, answer
    letters = [Symbol(f"argument {number}", real=True) for number in range(len(old))]
    return (
        replaced(gold, dict(zip(old, letters, strict=True))),
        replaced(answer, dict(zip(new, letters, strict=True))),
    )


def _defined_function(value: Any) -> Any:
    """Return f(x) of f(x) = x^2, and of a list of such equations for it alone; None for anything
    else, also for f(2) = 4 and P(A) = 1, whose arguments are not small letters.
    """
    equations = written_members(value) if isinstance(value, FiniteSet) else [value]
    if not equations or not all(isinstance(item, Eq) for item in equations):
        return None
    function = equations[0].lhs
    if any(equation.lhs != function for equation in equations):
        return None
    if not isinstance(function, AppliedUndef):
        return None
    has_name = _FUNCTION_NAME.fullmatch(str(function.func))
    return function if has_name and _are_arguments(function.args) else None


def _are_arguments(values: Sequence[Any]) -> bool:
    """True for different small letters; capital ones are events and matrices: P(A)."""
    names = [value.name for value in values if isinstance(value, Symbol)]
    # As many different names as values: all are letters, and none occurs twice.
    return len(set(names)) == len(values) and all(map(str.islower, names))


def without_names(gold: Any, answer: Any) -> tuple[Any, Any]:
    """Return gold and answer without a leading `x =` where that only names the value; else as they
    are.

    Both have one: it is dropped if it is the same letter, as in x = 5 and x = 5, or if both are
    chains of numbers that hold, such as 2 + 3 = 5. The gold alone has one: it is dropped if it is a
    letter or a chain of numbers that holds. The answer alone has one: it is dropped whatever it is,
    unless it is a chain that does not hold: a solution may name its value as it likes.
    """
    in_gold, in_answer = read_assignment(gold), read_assignment(answer)
    if in_gold and in_answer:
        if in_gold.is_of_numbers and in_answer.is_of_numbers:
            drops_names = _holds(gold) and _holds(answer)
        else:
            drops_names = in_gold.name == in_answer.name and _is_name(in_gold.name)
        if drops_names:
            return in_gold.value, in_answer.value
    elif in_gold and not is_relation(answer) and _holds(gold):
        if _is_name(in_gold.name) or in_gold.is_of_numbers:
            return in_gold.value, answer
    elif in_answer and not is_relation(gold) and _holds(answer):
        return gold, in_answer.value
    return gold, answer


def read_assignment(value: Any) -> Assignment | None:
    """Read `x = 5`, `5 = x`, `x + y = 5` and `f(2) = 2 + 3 = 5`; None for anything else."""
    relations = relations_of(value)
    if not relations or not all(isinstance(item, Eq) for item in relations):
        return None
    first, last = relations[0].lhs, relations[-1].rhs
    if _is_name(last) and not _is_name(first):
        return Assignment(name=last, value=first)
    return Assignment(name=first, value=last)


def _holds(chain: Any) -> bool:
    """True if neighbours in a chain of equations that are numbers are the same number."""
    for relation in relations_of(chain):
        sides = [cleaned(side) for side in relation.args]
        if all(map(is_number, sides)) and not same_values_of_numbers(*sides):
            return False
    return True


def _is_name(value: Any) -> bool:
    """True for letters without numbers: x, f(x), AB, |AB|, a + b, a - b, and (x, y), which the
    parser may take for an interval.
    """
    if isinstance(value, Interval):
        return all(isinstance(end, Symbol) for end in ends_of(value))
    if isinstance(value, Tuple):
        return all(isinstance(member, Symbol) for member in value.args)
    if isinstance(value, AppliedUndef):
        return True
    if not isinstance(value, Expr):
        return False
    # a - b holds the number -1.
    are_letters = all(isinstance(atom, Symbol) or atom == -1 for atom in value.atoms())
    return are_letters and not value.is_number
