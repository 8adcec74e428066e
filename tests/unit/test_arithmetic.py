"""The embedded task: what it promises of its problems and of its reference responses."""

import random
import re
from itertools import islice

import pytest
from arithmetic_solutions import minimal_response, verbose_response

from megatron_opsft.data.arithmetic import NUM_PROBLEMS, draw_problems, load_arithmetic, split_of
from megatron_opsft.errors import UserError


def numbers_in(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


@pytest.mark.slow
def test_splits_share_no_problem_and_no_terms() -> None:
    train, test = load_arithmetic("train"), load_arithmetic("test")
    assert (len(train), len(test)) == (NUM_PROBLEMS["train"], NUM_PROBLEMS["test"])
    assert len({problem.text for problem in train + test}) == len(train) + len(test)
    terms = {
        split: {problem.terms for problem in islice(draw_problems(split, seed=0), 20_000)}
        for split in ("train", "test")
    }
    assert not terms["train"] & terms["test"]
    assert len(terms["train"]) > 1000 and len(terms["test"]) > 200


def test_split_of_fixed_terms_never_changes() -> None:
    assert {split_of(terms) for terms in ((3, 3), (4, 7), (5, -2))} == {"test"}
    assert {split_of(terms) for terms in ((2, 3), (2, -2), (2, 7))} == {"train"}


def test_answer_is_the_sum_and_is_not_in_the_prompt() -> None:
    for problem in islice(draw_problems("train", seed=1), 2000):
        assert numbers_in(problem.text) == [abs(term) for term in problem.terms]
        assert sum(problem.terms) == problem.answer >= 1
        assert problem.answer not in numbers_in(problem.text)
        assert min(problem.partials) >= 1


def test_every_equation_of_a_response_holds_and_the_number_of_checks_varies() -> None:
    rng, counts = random.Random(0), []
    for problem in islice(draw_problems("train", seed=2), 1000):
        response, least = verbose_response(rng, problem), minimal_response(problem)
        assert response.startswith(least.split("\n</think>")[0])
        assert response.endswith(f"\n</think>\n\\boxed{{{problem.answer}}}")
        for left, sign, right, result in re.findall(r"(\d+)([+-])(\d+)=(\d+)", response):
            signed = int(right) if sign == "+" else -int(right)
            assert int(left) + signed == int(result)
        counts.append(response.count("\n") - least.count("\n"))
    assert min(counts) == 0 and max(counts) == 16
    assert 40 <= counts.count(0) <= 120


def test_problems_never_change_and_an_unknown_split_is_a_user_error() -> None:
    problem = load_arithmetic("test")[17]
    assert (problem.id, problem.answer) == ("arithmetic-test-17", "1")
    assert (
        problem.text == "Max starts with 7 pens. Then Max sells 6. How many are there in the end?"
    )
    with pytest.raises(UserError, match="no split 'validation'"):
        load_arithmetic("validation")  # type: ignore[arg-type]
