"""Whether two values that math-verify's parser has read are equal.

Numbers, formulas, relations, and these inside tuples, sets, intervals and matrices are compared
here; math-verify judges everything else, and only ever sees exact numbers.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import sympy
from latex2sympy2_extended.logic import And
from math_verify import verify
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from megatron_opsft.verify.decimals import same_values_of_numbers
from megatron_opsft.verify.formulas import same_formula, same_relation, solution_set
from megatron_opsft.verify.names import assigned, with_same_arguments, without_names
from megatron_opsft.verify.values import (
    cleaned,
    ends_of,
    exact,
    is_number,
    is_relation,
    relations_of,
    written_members,
)

# Kinds of values that are never equal; see `_kind`.
_APART = (
    {"between", "numbers"},
    {"between", "named"},
    {"pair", "named"},
    {"each", "named"},
)
_TURNED = {
    sympy.Gt: sympy.Lt,
    sympy.Ge: sympy.Le,
    sympy.Lt: sympy.Gt,
    sympy.Le: sympy.Ge,
}
_SYMMETRIC = (sympy.Eq, sympy.Ne)


def same_value(gold: Any, answer: Any) -> bool:
    """Whether two values, as `values_of` gives them, are equal."""
    if {_kind(gold), _kind(answer)} in _APART:
        return False
    gold, answer = map(cleaned, without_names(*with_same_arguments(gold, answer)))
    numbers = _single(gold), _single(answer)
    if all(map(is_number, numbers)):
        return same_values_of_numbers(*numbers)
    if (same := _same_members(gold, answer)) is not None:
        return same
    if is_relation(gold) and is_relation(answer) and _same_relations(gold, answer):
        return True
    gold, answer = map(exact, _described_sets(gold, answer))
    if is_relation(gold) or is_relation(answer):
        return False
    if (same := _same_members(gold, answer)) is not None:
        return same
    if (same := same_formula(gold, answer)) is not None:
        return same
    limits = {"numeric_precision": 40, "timeout_seconds": None}
    return bool(verify(gold, answer, **limits))


def _described_sets(gold: Any, answer: Any) -> tuple[Any, Any]:
    """Two conditions for one letter as the sets of numbers that they allow, or one condition beside
    a set; both as they are where the letters differ.
    """
    if not all(
        is_relation(one) or isinstance(one, sympy.Set) for one in (gold, answer)
    ):
        return gold, answer
    left, right = solution_set(gold), solution_set(answer)
    if isinstance(left, sympy.Set) and isinstance(right, sympy.Set):
        letters = [
            _letters(one) - _letters(left) - _letters(right) for one in (gold, answer)
        ]
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
            return "" if assigned(value) else "between"
        case sympy.FiniteSet() if all(
            isinstance(one, sympy.Expr) for one in value.args
        ):
            return "numbers"
        case sympy.FiniteSet() if all(isinstance(one, sympy.Eq) for one in value.args):
            names = {one.lhs for one in value.args}
            return (
                "named"
                if len(names) == 1
                else "each"
                if len(names) == len(value.args)
                else ""
            )
    return "pair" if isinstance(value, sympy.Interval) else ""


def _single(value: Any) -> Any:
    """The value of a set that holds one, perhaps twice (1/2 or 0.5); else the value itself."""
    if isinstance(value, sympy.FiniteSet) and value.args:
        first, *others = value.args
        if all(same_value(first, other) for other in others):
            return first
    return value


def _same_relations(gold: Any, answer: Any) -> bool:
    """Whether two relations, or two chains of as many, are the same in some order."""
    others = list(relations_of(answer))
    for relation in relations_of(gold):
        partner = next(
            (one for one in others if _same_two_relations(relation, one)), None
        )
        if partner is None:
            return False
        others.remove(partner)
    return not others


def _same_two_relations(gold: Relational, answer: Relational) -> bool:
    """Whether one is a multiple of the other, or has the same sides."""
    same = same_relation(exact(gold), exact(answer))
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
            return closed[0] == closed[1] and _all_same(ends_of(gold), ends_of(answer))
        case sympy.FiniteSet(), sympy.FiniteSet() if (left is None) == (right is None):
            members = (
                written_members(gold),
                written_members(answer),
            )  # 3, 3, 5 is not 3, 5, 5
            as_lists = len(members[0]) == len(members[1])
            return _same_sets(*(members if as_lists else (gold.args, answer.args)))
        case _, sympy.FiniteSet() if (
            left is not None
        ):  # 1, 2 for (1, 2) and for x = 1, y = 2
            return _all_same(left, right or written_members(answer))
        case sympy.FiniteSet(), _ if left is None and right:
            written = written_members(gold)
            return len(written) == len(right) and _same_sets(written, right)
    return None if left is None or right is None else _all_same(left, right)


def _ordered(value: Any) -> Sequence[Any] | None:
    """The members, in order, of a tuple, a vector, (a, b) (perhaps an interval), x = 2, y = 3."""
    match value:
        case sympy.FiniteSet() if _kind(value) == "each":
            members = written_members(value)
            in_order = {str(one.lhs) for one in members} <= {*"xyz"}
            return [
                one.rhs for one in (sorted(members, key=str) if in_order else members)
            ]
        case sympy.Tuple():
            return value.args
        case sympy.Interval(left_open=sympy.true, right_open=sympy.true):
            return ends_of(value)
        case sympy.MatrixBase() if 1 in value.shape:
            return value.flat()
    return None


def _all_same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(map(same_value, left, right))


def _same_sets(left: Sequence[Any], right: Iterable[Any]) -> bool:
    """Whether each of the one has a partner in the other."""
    others = list(right)
    for value in left:
        partner = next(
            (i for i, other in enumerate(others) if same_value(value, other)), None
        )
        if partner is None:
            return False
        del others[partner]
    return not others
