"""Metrics of samples without intervals."""

from collections.abc import Sequence

import numpy as np

from megatron_opsft.evaluate.metrics import ScoredSample, arrange, measure


def measure_samples(samples: Sequence[ScoredSample]) -> dict[str, float]:
    """All metrics of one benchmark."""
    grid = arrange(samples)
    ones = np.ones((1, grid.num_problems), dtype=np.int64)
    return {name: float(value[0]) for name, value in measure(grid, ones).items()}
