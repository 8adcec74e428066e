"""What the same samples would have given under smaller token budgets, without a second run.

A response longer than a budget would have been cut off there: it counts as unfinished, wrong and
`budget` tokens long. One that fits stays as it is. That is exact for sampling from left to right
(`cut_is_exact`); whether a cut response already held its answer is not asked, as in the paper's
truncation.
"""

from collections.abc import Sequence

import numpy as np

from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.metrics import (
    Counts,
    Floats,
    SampleGrid,
    efficiency,
    mean_over_problems,
    problem_values,
)

BUDGET_METRICS = ("accuracy", "mean_tokens", "truncated_share")


def cut_is_exact(method: object) -> bool:
    """Whether samples of a method, cut at a budget, are those of a run with that limit.

    Not for `deer`: it tries an answer only where the room left is enough, so under a smaller limit
    it would exit less often than in the samples, and its curve would be too good.
    """
    return method != "deer"


def default_budgets(max_tokens: int) -> tuple[int, ...]:
    """The limit of the run and up to six powers of two below it: 1,024 ... 16,384, 32,768."""
    powers = [1 << e for e in range(max_tokens.bit_length())]
    return (*(p for p in powers if max_tokens < 64 * p and p < max_tokens), max_tokens)


def check_budgets(budgets: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """In ascending order, each once; `UserError` for one that the samples cannot answer."""
    for budget in budgets:
        if not 1 <= budget <= max_tokens:
            raise UserError(
                f"budgets={budget}: must be from 1 to {max_tokens}, the token limit of the run"
            )
    return tuple(sorted(set(budgets)))


def cut_at(grid: SampleGrid, budget: int) -> SampleGrid:
    """The grid had generation stopped after `budget` tokens."""
    fits_PN = grid.tokens_PN <= budget
    return SampleGrid(
        problem_ids=grid.problem_ids,
        tokens_PN=np.minimum(grid.tokens_PN, budget),
        correct_PN=grid.correct_PN & fits_PN,
        finished_PN=grid.finished_PN & fits_PN,
        answered_PN=grid.answered_PN & fits_PN,
    )


def measure_at(grid: SampleGrid, budget: int, counts_DP: Counts) -> dict[str, Floats]:
    """Metric -> [D] of the samples cut at `budget`: BUDGET_METRICS, NormStd if there is any, and
    efficiency.
    """
    values = problem_values(cut_at(grid, budget))
    names = [name for name in values if name in (*BUDGET_METRICS, "norm_std")]
    metrics = mean_over_problems({name: values[name] for name in names}, counts_DP)
    metrics["efficiency"] = efficiency(metrics["accuracy"], metrics["mean_tokens"])
    return metrics
