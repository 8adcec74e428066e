"""Comparison of two values that math-verify's parser has read.

Numbers, formulas, relations, and these inside tuples, sets, intervals and matrices are compared
here; math-verify judges everything else, and only ever sees exact numbers.
"""

from collections.abc import Callable, Sequence
from typing import Any

from latex2sympy2_extended.logic import And
from math_verify import verify
from sympy import (
    Eq,
    Expr,
    FiniteSet,
    Interval,
    MatrixBase,
    Set,
    Tuple,
    Union,
)
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from megatron_opsft.verify.decimals import same_values_of_numbers
from megatron_opsft.verify.formulas import same_formula, same_relation, solution_set
from megatron_opsft.verify.names import (
    read_assignment,
    with_same_arguments,
    without_names,
)
from megatron_opsft.verify.parsing import read_value
from megatron_opsft.verify.values import (
    cleaned,
    ends_of,
    exact,
    is_number,
    is_relation,
    relations_of,
    written_members,
)

# Two values of these kinds are never equal; see `_kind`.
_DIFFERENT_KINDS = (
    {"between", "numbers"},
    {"between", "named"},
    {"pair", "named"},
    {"assignments", "named"},
)


def same_text_value(gold: str, answer: str) -> bool:
    """True if two texts are mathematics, and their values are equal."""
    gold_value = read_value(gold)
    if gold_value is None:
        return False
    answer_value = read_value(answer)
    return answer_value is not None and same_value(gold_value, answer_value)


def same_value(gold: Any, answer: Any) -> bool:
    """True if two values, as `read_value` returns them, are equal."""
    if {_kind(gold), _kind(answer)} in _DIFFERENT_KINDS:
        return False
    gold, answer = with_same_arguments(gold, answer)
    gold, answer = map(cleaned, without_names(gold, answer))
    gold_number, answer_number = _single_member(gold), _single_member(answer)
    if is_number(gold_number) and is_number(answer_number):
        return same_values_of_numbers(gold_number, answer_number)
    if (same := _same_members(gold, answer)) is not None:
        return same
    relations = relations_of(gold)
    if relations and _match_up(relations, relations_of(answer), _same_two_relations):
        return True
    # What follows, math-verify included, sees no decimals.
    gold, answer = map(exact, _as_number_sets(gold, answer))
    if is_relation(gold) or is_relation(answer):
        return False
    if (same := _same_members(gold, answer)) is not None:
        return same
    if (same := same_formula(gold, answer)) is not None:
        return same
    return bool(verify(gold, answer, numeric_precision=40, timeout_seconds=None))


def _as_number_sets(gold: Any, answer: Any) -> tuple[Any, Any]:
    """Return two conditions for one letter, or a condition and a set, as the sets of numbers that
    they allow; both as they are if the letters differ.
    """
    if not all(
        is_relation(value) or isinstance(value, Set) for value in (gold, answer)
    ):
        return gold, answer
    gold_set, answer_set = solution_set(gold), solution_set(answer)
    if isinstance(gold_set, Set) and isinstance(answer_set, Set):
        # The letters for which the sets are solved: x of x > a, whose set has the letter a alone.
        unsolved = _letters(gold_set) | _letters(answer_set)
        gold_letters = _letters(gold) - unsolved
        answer_letters = _letters(answer) - unsolved
        if gold_letters == answer_letters or not gold_letters or not answer_letters:
            return gold_set, answer_set
    return gold, answer


def _letters(value: Any) -> set[Any]:
    """Return the letters of a value, and the values of unknown functions."""
    return value.free_symbols | value.atoms(AppliedUndef)


def _kind(value: Any) -> str:
    """Return the kind of a value that says how many numbers it stands for.

    "between": all numbers between bounds, 1 < x < 2. "numbers": a list, 1, 2. "named": a list of
    values of one name, x = 1 or x = 2. "assignments": a value for each of several names,
    x = 1, y = 2. "pair": (1, 2), which the parser takes for an interval. "": anything else.
    """
    match value:
        case Eq(rhs=Interval() | Union()):
            return "between"
        case Eq(rhs=FiniteSet()):
            return "named"
        case Relational() | And():
            return "" if read_assignment(value) else "between"
        case Interval():
            return "pair"
        case FiniteSet():
            return _kind_of_list(value.args)
    return ""


def _kind_of_list(members: Sequence[Any]) -> str:
    """Return the kind of a list, as `_kind` does: "numbers", "named", "assignments" or ""."""
    if all(isinstance(member, Expr) for member in members):
        return "numbers"
    if all(isinstance(member, Eq) for member in members):
        names = {equation.lhs for equation in members}
        if len(names) == 1:
            return "named"
        if len(names) == len(members):
            return "assignments"
    return ""


def _single_member(value: Any) -> Any:
    """Return the member of a set of one, perhaps written twice (1/2 or 0.5); else the value."""
    if isinstance(value, FiniteSet) and value.args:
        first, *others = value.args
        if all(same_value(first, member) for member in others):
            return first
    return value


def _same_two_relations(gold: Relational, answer: Relational) -> bool:
    """True if one is a multiple of the other, or has the same sides, perhaps exchanged."""
    same = same_relation(exact(gold), exact(answer))
    if same is not None:
        return same
    return any(
        form.func is answer.func and _all_same(form.args, answer.args)
        for form in (gold, gold.reversed)
    )


def _same_members(gold: Any, answer: Any) -> bool | None:
    """Compare two collections member by member; None if they are not two collections."""
    match gold, answer:
        case MatrixBase(), MatrixBase():
            return gold.shape == answer.shape and _all_same(gold.flat(), answer.flat())
        case Interval(), Interval():
            same_brackets = (
                gold.left_open == answer.left_open
                and gold.right_open == answer.right_open
            )
            return same_brackets and _all_same(ends_of(gold), ends_of(answer))
    gold_in_order, answer_in_order = _ordered_members(gold), _ordered_members(answer)
    gold_is_list = isinstance(gold, FiniteSet) and gold_in_order is None
    answer_is_list = isinstance(answer, FiniteSet) and answer_in_order is None
    both_are_sets = isinstance(gold, FiniteSet) and isinstance(answer, FiniteSet)
    if both_are_sets and gold_is_list == answer_is_list:
        return _same_lists(gold, answer)
    if gold_is_list and answer_in_order:
        members = written_members(gold)
        same_length = len(members) == len(answer_in_order)
        return same_length and _match_up(members, answer_in_order, same_value)
    if answer_is_list:  # the list 1, 2 is right for (1, 2) and for x = 1, y = 2
        answer_in_order = written_members(answer)
    if gold_in_order is None or answer_in_order is None:
        return None
    return _all_same(gold_in_order, answer_in_order)


def _same_lists(gold: FiniteSet, answer: FiniteSet) -> bool:
    """Compare two lists in any order. Of equally long ones all members count: 3, 3, 5 is not
    3, 5, 5. Otherwise repeated members count once: 3, 3, 5 is 3, 5.
    """
    members, answer_members = written_members(gold), written_members(answer)
    if len(members) == len(answer_members):
        return _match_up(members, answer_members, same_value)
    return _match_up(gold.args, answer.args, same_value)


def _ordered_members(value: Any) -> Sequence[Any] | None:
    """Return the members of a tuple, a vector, (a, b) (perhaps an interval), and the values of
    x = 2, y = 3, in their order; None for anything else.
    """
    match value:
        case FiniteSet() if _kind(value) == "assignments":
            equations = written_members(value)
            if {str(equation.lhs) for equation in equations} <= {"x", "y", "z"}:
                equations = sorted(equations, key=str)
            return [equation.rhs for equation in equations]
        case Tuple():
            return value.args
        case Interval() if value.left_open and value.right_open:
            return ends_of(value)
        case MatrixBase() if 1 in value.shape:
            return value.flat()
    return None


def _all_same(gold: Sequence[Any], answer: Sequence[Any]) -> bool:
    """True if both have equally many values, and those at the same places are equal."""
    return len(gold) == len(answer) and all(map(same_value, gold, answer))


def _match_up(
    gold: Sequence[Any], answer: Sequence[Any], is_same: Callable[[Any, Any], bool]
) -> bool:
    """True if each member of `gold` has a partner of its own in `answer`, and none is left over."""
    unmatched = list(answer)
    for member in gold:
        for index, candidate in enumerate(unmatched):
            if is_same(member, candidate):
                del unmatched[index]
                break
        else:
            return False
    return not unmatched
