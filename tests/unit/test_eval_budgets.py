"""Token budgets from stored samples, by hand."""

import numpy as np
import pytest

from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.budgets import check_budgets, cut_at, default_budgets, measure_at
from megatron_opsft.evaluate.metrics import ScoredSample, arrange


def sample(problem: str, index: int, tokens: int, correct: bool, limit: int = 400) -> ScoredSample:
    return ScoredSample(
        problem_id=problem,
        sample_index=index,
        num_tokens=tokens,
        correct=correct,
        finished=tokens < limit,
        has_answer=True,
    )


# Problem a: 100 right, 300 right. Problem b: 200 wrong, 400 cut off by the limit.
GRID = arrange(
    [
        sample("a", 0, 100, True),
        sample("a", 1, 300, True),
        sample("b", 0, 200, False),
        sample("b", 1, 400, False),
    ]
)
BY_HAND = {
    # budget: accuracy, mean tokens, NormStd, truncated share
    99: (0 / 4, 99.0, 0.0, 4 / 4),
    100: (1 / 4, 100.0, 0.0, 3 / 4),
    200: (1 / 4, (100 + 200 + 200 + 200) / 4, (50 / 150 + 0) / 2, 2 / 4),
    299: (1 / 4, (100 + 299 + 200 + 299) / 4, (99.5 / 199.5 + 49.5 / 249.5) / 2, 2 / 4),
    300: (2 / 4, (100 + 300 + 200 + 300) / 4, (100 / 200 + 50 / 250) / 2, 1 / 4),
    400: (2 / 4, 250.0, (100 / 200 + 100 / 300) / 2, 1 / 4),
}


@pytest.mark.parametrize("budget", BY_HAND)
def test_budget_by_hand(budget: int) -> None:
    found = measure_at(GRID, budget, np.ones((1, 2), dtype=np.int64))
    accuracy, tokens, norm_std, truncated = BY_HAND[budget]
    assert {name: value[0] for name, value in found.items()} == pytest.approx(
        {
            "accuracy": accuracy,
            "mean_tokens": tokens,
            "norm_std": norm_std,
            "truncated_share": truncated,
            "efficiency": 1e4 * accuracy / tokens,
        }
    )


def test_cutting_leaves_the_samples_alone_and_cuts_add_up() -> None:
    before = GRID.tokens_PN.copy()
    twice = cut_at(cut_at(GRID, 300), 150)
    once = cut_at(GRID, 150)
    assert (GRID.tokens_PN == before).all()
    for name in ("tokens_PN", "correct_PN", "finished_PN", "answered_PN"):
        assert (getattr(twice, name) == getattr(once, name)).all()


def test_default_budgets() -> None:
    assert default_budgets(32768) == (1024, 2048, 4096, 8192, 16384, 32768)
    assert default_budgets(350) == (8, 16, 32, 64, 128, 256, 350)
    assert default_budgets(1) == (1,)


def test_budgets_are_checked() -> None:
    assert check_budgets([300, 100, 300], 300) == (100, 300)
    for wrong in (0, -1, 301):
        with pytest.raises(UserError, match=f"budgets={wrong}: must be from 1 to 300"):
            check_budgets([100, wrong], 300)
