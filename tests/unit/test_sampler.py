"""The order of problems: a function of (seed, step), each problem once an epoch."""

import random

import pytest

from megatron_opsft.data.sampler import ProblemSampler
from megatron_opsft.errors import UserError


def draw(sampler: ProblemSampler, steps: range) -> list[int]:
    return [index for step in steps for index in sampler.indices(step)]


def test_every_epoch_holds_each_problem_once_in_a_new_order() -> None:
    drawn = draw(ProblemSampler(num_problems=10, batch_size=4, seed=3), range(10))
    epochs = [drawn[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_order_depends_on_seed_and_step_alone() -> None:
    forward = ProblemSampler(num_problems=50, batch_size=8, seed=1)
    late = ProblemSampler(num_problems=50, batch_size=8, seed=1)
    random.seed(123)
    state = random.getstate()
    assert [forward.indices(step) for step in range(20)][17] == late.indices(17)
    assert random.getstate() == state
    assert forward.indices(0) != ProblemSampler(num_problems=50, batch_size=8, seed=2).indices(0)


def test_order_is_the_same_in_every_release() -> None:
    sampler = ProblemSampler(num_problems=8, batch_size=8, seed=0)
    assert sampler.indices(0) == [2, 3, 4, 7, 1, 5, 0, 6]


def test_fewer_problems_than_the_batch_repeat_evenly() -> None:
    drawn = ProblemSampler(num_problems=3, batch_size=9, seed=0).indices(5)
    assert [drawn.count(index) for index in range(3)] == [3, 3, 3]


def test_nothing_to_draw_is_a_user_error() -> None:
    with pytest.raises(UserError, match="no problems"):
        ProblemSampler(num_problems=0, batch_size=4, seed=0)
    with pytest.raises(UserError, match="prompts_per_step"):
        ProblemSampler(num_problems=4, batch_size=0, seed=0)
