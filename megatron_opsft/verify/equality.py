"""Whether two values that math-verify's parser has read are equal.

Numbers, formulas, relations, and these inside tuples, sets, intervals and matrices are compared
here; math-verify judges everything else, and only ever sees exact numbers.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import sympy
from latex2sympy2_extended.logic import And
from math_verify import verify
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from megatron_opsft.verify.decimals import exactly, same_values_of_numbers
from megatron_opsft.verify.formulas import same_formula, same_relation, solution_set

# Kinds of values that are never equal; see `_kind`.
_APART = ({"between", "numbers"}, {"between", "named"}, {"pair", "named"})
_FUNCTION_NAME = re.compile(r"[a-zA-Z](?:_\S+)?|\\text\{[a-zA-Z](?:prime)+\}")  # f, f_1, f'
_TURNED = {sympy.Gt: sympy.Lt, sympy.Ge: sympy.Le, sympy.Lt: sympy.Gt, sympy.Le: sympy.Ge}
_SYMMETRIC = (sympy.Eq, sympy.Ne)


def same_value(gold: Any, answer: Any) -> bool:
    """Whether two values, as `values_of` gives them, are equal."""
    if {_kind(gold), _kind(answer)} in _APART:
        return False
    gold, answer = map(_cleaned, _unwrapped(*_with_same_arguments(gold, answer)))
    numbers = _single(gold), _single(answer)
    if all(map(_is_number, numbers)):
        return same_values_of_numbers(*numbers)
    if (same := _same_members(gold, answer)) is not None:
        return same
    if _is_relation(gold) and _is_relation(answer) and _same_relations(gold, answer):
        return True
    gold, answer = map(_exact, _described_sets(gold, answer))
    if _is_relation(gold) or _is_relation(answer):
        return False
    if (same := _same_members(gold, answer)) is not None:
        return same
    if (same := same_formula(gold, answer)) is not None:
        return same
    limits = {"numeric_precision": 40, "timeout_seconds": None}
    return bool(verify(gold, answer, **limits))


def _with_same_arguments(gold: Any, answer: Any) -> tuple[Any, Any]:
    """Both with the same letters for a function's arguments: f(t) = t^2 is f(x) = x^2."""
    if not (isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq)):
        return gold, answer
    functions = gold.lhs, answer.lhs
    if not all(isinstance(one, AppliedUndef) for one in functions):
        return gold, answer
    letters = [one.args for one in functions]
    if functions[0].func != functions[1].func or len(letters[0]) != len(letters[1]):
        return gold, answer
    if not all(map(_are_arguments, letters)) or not _FUNCTION_NAME.fullmatch(
        str(functions[0].func)
    ):
        return gold, answer
    bound = [sympy.Symbol(f"argument {number}", real=True) for number in range(len(letters[0]))]
    renamed = [dict(zip(one, bound, strict=True)) for one in letters]
    return _replaced(gold, renamed[0]), _replaced(answer, renamed[1])


def _are_arguments(values: Sequence[Any]) -> bool:
    """Whether they are different small letters; capital ones are events and matrices: P(A)."""
    names = [one.name for one in values if isinstance(one, sympy.Symbol)]
    return len(set(names)) == len(values) and all(name.islower() for name in names)


def _unwrapped(gold: Any, answer: Any) -> tuple[Any, Any]:
    """Drop `x =` if both sides have it, or if only one side does and it just names the value. A
    chain such as 2 + 3 = 5 is its last number if it holds, and else no number.
    """
    left, right = _assigned(gold), _assigned(answer)
    if left and right and all(map(_is_number, (*left, *right))):
        return (left[1], right[1]) if _holds(gold) and _holds(answer) else (gold, answer)
    if left and right:
        return (left[1], right[1]) if left[0] == right[0] and _is_name(left[0]) else (gold, answer)
    if left and not _is_relation(answer) and _holds(gold):
        names_value = _is_name(left[0]) or all(map(_is_number, left))
        return (left[1], answer) if names_value else (gold, answer)
    if right and not _is_relation(gold) and _holds(answer):
        return gold, right[1]
    return gold, answer


def _assigned(value: Any) -> tuple[Any, Any] | None:
    """(what, value) of `x = 5`, `x + y = 5` and `f(2) = 2 + 3 = 5`."""
    parts = _relations_of(value)
    if not parts or not all(isinstance(part, sympy.Eq) for part in parts):
        return None
    left, right = parts[0].lhs, parts[-1].rhs
    return (right, left) if _is_name(right) and not _is_name(left) else (left, right)


def _holds(chain: Any) -> bool:
    """Whether neighbours in a chain of equations that are numbers are the same number."""
    for part in _relations_of(chain):
        sides = [_cleaned(side) for side in part.args]
        if all(map(_is_number, sides)) and not same_values_of_numbers(*sides):
            return False
    return True


def _relations_of(value: Any) -> Sequence[Any]:
    """The relations of a chain such as 1 < x < 2 in their order; () for anything else."""
    if isinstance(value, And):
        return getattr(value, "_unsorted_args", value.args)
    return (value,) if isinstance(value, Relational) else ()


def _is_relation(value: Any) -> bool:
    return isinstance(value, Relational | And)


def _described_sets(gold: Any, answer: Any) -> tuple[Any, Any]:
    """Two conditions for one letter as the sets of numbers that they allow, or one condition beside
    a set; both as they are where the letters differ.
    """
    if not all(_is_relation(one) or isinstance(one, sympy.Set) for one in (gold, answer)):
        return gold, answer
    left, right = solution_set(gold), solution_set(answer)
    if isinstance(left, sympy.Set) and isinstance(right, sympy.Set):
        letters = [_letters(one) - _letters(left) - _letters(right) for one in (gold, answer)]
        if letters[0] == letters[1] or not all(letters):
            return left, right
    return gold, answer


def _letters(value: Any) -> set[Any]:
    """The letters of a value, and the values of unknown functions."""
    return value.free_symbols | value.atoms(AppliedUndef)


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
    """Letters without numbers: x, f(x), AB, |AB|, a + b and (x, y), perhaps read as an interval."""
    if isinstance(value, sympy.Interval | sympy.Tuple):
        parts = _ends(value) if isinstance(value, sympy.Interval) else value.args
        return all(isinstance(part, sympy.Symbol) for part in parts)
    if isinstance(value, AppliedUndef):
        return True
    if not isinstance(value, sympy.Expr):
        return False
    return all(isinstance(atom, sympy.Symbol) or atom == -1 for atom in value.atoms())


def _is_number(value: Any) -> bool:
    return isinstance(value, sympy.Expr) and bool(value.is_number)


def _single(value: Any) -> Any:
    """The value of a set that holds one, perhaps twice (1/2 or 0.5); else the value itself."""
    if isinstance(value, sympy.FiniteSet) and value.args:
        first, *others = value.args
        if all(same_value(first, other) for other in others):
            return first
    return value


def _exact(value: Any) -> Any:
    """The value with every decimal as the fraction that it says."""
    if not isinstance(value, sympy.Basic | sympy.MatrixBase):
        return value
    if _is_relation(value):
        decimals = value.atoms(sympy.Float)
        return _replaced(value, {one: sympy.Rational(str(one)) for one in decimals})
    return exactly(value)


def _cleaned(value: Any) -> Any:
    """The value with i as the imaginary unit, all other letters real, and per cent as a factor: the
    parser reads each letter of a complex number as one that is not real. Equations in a set wait
    until their names are gone.
    """
    if not isinstance(value, sympy.Basic | sympy.MatrixBase) or _kind(value) == "named":
        return value
    letters = {
        letter: sympy.I if letter.name == "i" else sympy.Symbol(letter.name, real=True)
        for letter in value.free_symbols
        if letter.name == "i" or letter.is_real is False
    }
    value = _replaced(value, letters)
    per_cent = value.has(sympy.UnevaluatedExpr)
    return value.replace(sympy.UnevaluatedExpr, lambda inner: inner) if per_cent else value


def _replaced(value: Any, replacements: dict[Any, Any]) -> Any:
    """The value with atoms replaced; a relation stays one, even if it becomes true or false."""
    if not replacements:
        return value
    if isinstance(value, Relational):
        sides = [_replaced(side, replacements) for side in value.args]
        return value.func(*sides, evaluate=False)
    if isinstance(value, And):
        return And(*(_replaced(part, replacements) for part in _relations_of(value)))
    return value.xreplace(replacements)


def _same_relations(gold: Any, answer: Any) -> bool:
    """Whether two relations, or two chains of as many, are the same in some order."""
    others = list(_relations_of(answer))
    for relation in _relations_of(gold):
        partner = next((one for one in others if _same_two_relations(relation, one)), None)
        if partner is None:
            return False
        others.remove(partner)
    return not others


def _same_two_relations(gold: Relational, answer: Relational) -> bool:
    """Whether one is a multiple of the other, or has the same sides."""
    same = same_relation(_exact(gold), _exact(answer))
    if same is not None:
        return same
    if gold.func is answer.func and all(map(same_value, gold.args, answer.args)):
        return True
    is_turned = gold.func in _SYMMETRIC and gold.func is answer.func
    is_turned = is_turned or _TURNED.get(gold.func) is answer.func
    return is_turned and all(map(same_value, gold.args, reversed(answer.args)))


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
        case sympy.FiniteSet(), _ if left is None and right:
            written = _written_members(gold)
            return len(written) == len(right) and _same_sets(written, right)
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
    """Whether each of the one has a partner in the other."""
    others = list(right)
    for value in left:
        partner = next((i for i, other in enumerate(others) if same_value(value, other)), None)
        if partner is None:
            return False
        del others[partner]
    return not others
