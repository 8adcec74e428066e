"""Stored samples made up, and their metrics without intervals."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_opsft.commands.evaluate.metrics import arrange, measure
from megatron_opsft.data.stored_samples import StoredSample
from megatron_opsft.records import FinishReason, Outcome

Model = tuple[str, dict[str, list[StoredSample]], dict[str, Any]]  # name, samples, settings


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


def made_model(
    name: str,
    tokens: int,
    correct: int,
    benchmarks: Sequence[str] = ("gsm8k",),
    samples: int = 2,
    **settings: object,
) -> Model:
    """`correct` of 10 problems are solved; the mean length is `tokens` + 4.5, on AIME about twice
    that.
    """

    def one(p: int, n: int, most: int) -> StoredSample:
        texts = {"gold": "7" if p < correct else "8", "text": f"{name} says 7"}
        return stored(f"p{p}", n, most + p, p < correct, **texts)

    found = {
        each: [one(p, n, tokens << (each == "aime24")) for p in range(10) for n in range(samples)]
        for each in benchmarks
    }
    return name, found, {"temperature": 0.6, **settings}


def measure_samples(samples: Sequence[StoredSample]) -> dict[str, float]:
    """All metrics of one benchmark."""
    grid = arrange(samples)
    ones = np.ones((1, grid.num_problems), dtype=np.int64)
    return {name: float(value[0]) for name, value in measure(grid, ones).items()}
