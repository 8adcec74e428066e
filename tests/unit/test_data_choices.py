"""Held-out problems from the training data, duplicates, and what a run says of its data."""

import pytest

from megatron_opsft.config import Config
from megatron_opsft.config.load import load_config
from megatron_opsft.data.choices import leave_out_duplicates, take_held_out
from megatron_opsft.data.notes import describe_data
from megatron_opsft.data.problems import ProblemSet
from megatron_opsft.errors import UserError
from megatron_opsft.records import Problem


def set_of(*pairs: tuple[str, str]) -> ProblemSet:
    problems = tuple(
        Problem(id=str(n), text=text, answer=answer) for n, (text, answer) in enumerate(pairs)
    )
    rows = tuple(range(1, len(pairs) + 1))
    return ProblemSet(
        name="d.jsonl",
        problems=problems,
        rows=rows,
        bad_rows=(),
        sources=("d.jsonl",),
        parts=(0,) * len(pairs),
    )


TEN = set_of(*((f"p{n}", str(n)) for n in range(10)))
TWICE = set_of(("a", "1"), ("b", "2"), (" a ", "1"), ("c", "3"), ("b", "4"))


def test_held_out_problems_are_taken_from_training_with_the_seed() -> None:
    train, held = take_held_out(TEN, 3, seed=0)
    assert (len(train.problems), len(held.problems)) == (7, 3)
    assert {*train.problems, *held.problems} == {*TEN.problems}
    assert take_held_out(TEN, 3, seed=0) == (train, held)
    assert take_held_out(TEN, 3, seed=1)[1].problems != held.problems
    assert len({train.sha256, held.sha256, TEN.sha256}) == 3
    assert [int(problem.id) + 1 for problem in train.problems] == list(train.rows)
    with pytest.raises(UserError, match=r"eval.holdout=10: d.jsonl has only 10 different"):
        take_held_out(TEN, 10, seed=0)


def test_a_held_out_problem_is_in_no_other_row() -> None:
    for seed in range(5):
        train, held = take_held_out(set_of(("a", "1"), ("b", "2"), ("a", "1")), 1, seed)
        assert not {p.text for p in train.problems} & {p.text for p in held.problems}


def test_duplicates_are_counted_and_left_out_as_asked() -> None:
    assert leave_out_duplicates(TWICE, "keep") is TWICE
    first = leave_out_duplicates(TWICE, "first")
    assert first.rows == (1, 2, 4)
    assert [(bad.row, bad.reason) for bad in first.bad_rows] == [
        (3, "repeats: row 1 has the same problem"),
        (5, "repeats: row 2 has the same problem"),
    ]
    dropped = leave_out_duplicates(TWICE, "drop")
    assert dropped.rows == (1, 4)
    assert [bad.row for bad in dropped.bad_rows] == [2, 3, 5]
    assert len({TWICE.sha256, first.sha256, dropped.sha256}) == 3


def config_of(*overrides: str) -> Config:
    return load_config(None, ["model.path=m", "data.train=d.jsonl", *overrides])


def test_what_is_unusual_is_said_and_nothing_else() -> None:
    usual = config_of("data.prompts_per_step=5", "run.steps=2")
    assert describe_data(usual, TEN, TEN) == []
    (none,) = describe_data(usual, TEN, None)
    assert none.startswith("nothing is evaluated: d.jsonl has no held-out problems")
    assert "eval.holdout=N" in none
    (large,) = describe_data(config_of("data.prompts_per_step=11"), TEN, TEN)
    assert large.startswith("data.prompts_per_step=11 is more than the 10 problems of d.jsonl")
    (again,) = describe_data(config_of("data.prompts_per_step=5", "run.steps=5"), TEN, TEN)
    assert again == "5 steps of 5 problems go through the 10 problems of d.jsonl 2.5 times"
    (repeated, through) = describe_data(usual, TWICE, TEN)
    assert repeated.startswith("2 rows repeat a problem of an earlier row, 1 problems have rows w")
