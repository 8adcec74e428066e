"""Stored samples made up, and their metrics without intervals."""

from collections.abc import Sequence

import numpy as np

from megatron_opsft.evaluate.benchmarks import StoredSample
from megatron_opsft.evaluate.metrics import arrange, measure
from megatron_opsft.records import FinishReason, Outcome


def stored(
    problem: str,
    index: int,
    tokens: int,
    correct: bool = False,
    *,
    finished: bool = True,
    outcome: Outcome | None = None,
    **changes: str,
) -> StoredSample:
    """Correct or wrong, where no outcome is given."""
    texts = {"answer": "7", "gold": "7", "text": "so \\boxed{7}\u2028 \n end"} | changes
    return StoredSample(
        problem_id=problem,
        sample_index=index,
        outcome=outcome or (Outcome.CORRECT if correct else Outcome.WRONG),
        finish_reason=FinishReason.STOP if finished else FinishReason.LENGTH,
        num_tokens=tokens,
        extra_tokens=0,
        **texts,
    )


def measure_samples(samples: Sequence[StoredSample]) -> dict[str, float]:
    """All metrics of one benchmark."""
    grid = arrange(samples)
    ones = np.ones((1, grid.num_problems), dtype=np.int64)
    return {name: float(value[0]) for name, value in measure(grid, ones).items()}
