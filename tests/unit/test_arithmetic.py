"""The embedded task: what it promises of its problems and of its reference responses."""

import random
import re
from itertools import islice

import pytest
from arithmetic_solutions import minimal_response, verbose_response

from megatron_opsft.data.arithmetic import NUM_PROBLEMS, draw_problems, load_arithmetic
from megatron_opsft.errors import UserError


@pytest.mark.slow
def test_splits_share_no_problem_and_no_terms() -> None:
    train, test = load_arithmetic("train"), load_arithmetic("test")
    assert (len(train), len(test)) == (NUM_PROBLEMS["train"], NUM_PROBLEMS["test"])
    assert len({problem.text for problem in train + test}) == len(train) + len(test)
    train_terms, test_terms = (
        {problem.terms for problem in islice(draw_problems(split, seed=0), 20_000)}
        for split in ("train", "test")
    )
    assert train_terms.isdisjoint(test_terms)
    assert len(train_terms) > 1000 and len(test_terms) > 200


def test_answer_is_the_sum_and_is_not_in_the_prompt() -> None:
    for problem in islice(draw_problems("train", seed=1), 2000):
        numbers = [int(number) for number in re.findall(r"\d+", problem.text)]
        assert numbers == [abs(term) for term in problem.terms]
        assert sum(problem.terms) == problem.answer and problem.answer not in numbers
        assert min(problem.partials) >= 1


def test_every_equation_of_a_response_holds_and_the_number_of_checks_varies() -> None:
    rng, counts = random.Random(0), []
    for problem in islice(draw_problems("train", seed=2), 1000):
        response, least = verbose_response(rng, problem), minimal_response(problem)
        assert response.startswith(least.split("\n</think>")[0])
        assert response.endswith(f"\n</think>\n\\boxed{{{problem.answer}}}")
        for left, right, result in re.findall(r"(\d+)([+-]\d+)=(\d+)", response):
            assert int(left) + int(right) == int(result)
        counts.append(response.count("\n") - least.count("\n"))
    assert min(counts) == 0 and max(counts) == 16
    assert 40 <= counts.count(0) <= 120


def test_problems_never_change_and_an_unknown_split_is_a_user_error() -> None:
    problem = load_arithmetic("test")[17]
    text = "Max starts with 7 pens. Then Max sells 6. How many are there in the end?"
    assert (problem.id, problem.answer, problem.text) == ("arithmetic-test-17", "1", text)
    with pytest.raises(UserError, match="no split 'validation'"):
        load_arithmetic("validation")  # type: ignore[arg-type]
