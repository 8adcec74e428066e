"""What fixed data sets are made of: CRST's choice of a response, StepEntropy's choice of steps and
TokenSkip's choice of words. Pure; what samples and scores is elsewhere.
"""

import math
import random
from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np

from megatron_opsft.errors import NonFiniteError
from megatron_opsft.records import Response

RATIOS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)  # TokenSkip's


def shortest_correct(responses: Sequence[Response], texts: Sequence[str]) -> int | None:
    """CRST's: the correct, finished response of fewest tokens, the first of equal ones; None if
    there is none. Of equal texts only the first counts.
    """
    firsts = {text: index for index, text in reversed(list(enumerate(texts)))}
    usable = [i for i in firsts.values() if responses[i].correct and responses[i].finished]
    return min(usable, key=lambda i: (responses[i].num_tokens, i), default=None)


def steps_of(token_ids: Sequence[int], separators: Collection[int]) -> list[range]:
    """StepEntropy's steps: the stretches between separator tokens (a double line break), without
    empty ones.
    """
    borders = [-1, *(i for i, t in enumerate(token_ids) if t in separators), len(token_ids)]
    steps = [range(a + 1, b) for a, b in zip(borders, borders[1:], strict=False)]
    return [step for step in steps if step]


def skipped_steps(
    steps: Sequence[range],
    entropies: Sequence[float],
    *,
    share: float = 0.8,
    score: Literal["sum", "mean"] = "sum",
) -> set[int]:
    """The int(share * steps) steps of least entropy, the earlier of equal ones; they become
    `[SKIP]`.

    entropies: of every token. sum: the paper's score of a step; mean: the code's, which takes
    -p log p of the sampled token for its entropy.
    """
    sums = [math.fsum(entropies[i] for i in step) for step in steps]
    if score == "mean":
        sums = [total / len(step) for total, step in zip(sums, steps, strict=True)]
    order = sorted(range(len(steps)), key=lambda number: (sums[number], number))
    return set(order[: int(share * len(steps))])


def ratio_of(problem_id: str, seed: int) -> float:
    """TokenSkip's share of tokens to keep, drawn once for each problem."""
    return random.Random(f"tokenskip:{seed}:{problem_id}").choice(RATIOS)


def kept_words(scores: Sequence[float], num_tokens: Sequence[int], ratio: float) -> list[bool]:
    """TokenSkip's choice: words strictly above the percentile int(100 (1 - ratio) + 1) of the
    scores, in which a word counts once for each of its tokens. A ratio of 1 keeps all.
    """
    if ratio >= 1 or not scores:
        return [True] * len(scores)
    threshold = np.percentile(np.repeat(scores, num_tokens), int(100 * (1 - ratio) + 1))
    if not np.isfinite(threshold):
        raise NonFiniteError("scores of a response's words are NaN or infinite")
    return [bool(score > threshold) for score in scores]
