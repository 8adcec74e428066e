"""Response lengths of a step as a plan assumes them: quantiles of a log-normal, cut at the limit.

Pure and without chance, so that the same plan gives the same numbers.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

# What on-policy SFT ends at with R1-Distill-1.5B: mean tokens and accuracy over five benchmarks
# (the paper's main table); it starts at 10,178 tokens, most of them cut off by the limit.
PAPER_MEAN_TOKENS = 2186.0
PAPER_ACCEPTANCE = 0.599
# What it starts at, most responses cut off by the limit, as far as a plan is asked about the start.
START_MEAN_TOKENS = 10000.0
START_ACCEPTANCE = 0.3
# Standard deviation of the logarithm, of 20 published responses of R1-Distill-7B to MATH-500.
DEFAULT_SIGMA = 0.94
# Mean of a prompt, template included. Assumption.
DEFAULT_PROMPT_TOKENS = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The responses of one step of all ranks.

    lengths: sampled tokens, in the order in which they are asked for. accepted: those of the
    responses trained on. prompt_tokens: mean of a prompt; limit: of a response.
    """

    lengths: tuple[int, ...]
    accepted: tuple[int, ...]
    prompt_tokens: int
    limit: int

    @property
    def sampled_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def trained_tokens(self) -> int:
        """Prompts included."""
        return sum(self.accepted) + self.prompt_tokens * len(self.accepted)


def make_workload(
    num_responses: int,
    *,
    mean_tokens: float,
    sigma: float,
    limit: int,
    acceptance: float,
    prompt_tokens: int,
) -> Workload:
    """mean_tokens, sigma: of the log-normal before it is cut; acceptance: share of all responses
    that is correct and finished. No more are accepted than finish.
    """
    ordered = quantiles(num_responses, mean_tokens=mean_tokens, sigma=sigma, limit=limit)
    finished = [n for n in ordered if n < limit]
    count = min(len(finished), round(acceptance * num_responses))
    return Workload(
        lengths=shuffled(ordered),
        accepted=tuple(finished[int((i + 0.5) * len(finished) / count)] for i in range(count)),
        prompt_tokens=prompt_tokens,
        limit=limit,
    )


def draw_workload(
    num_responses: int,
    *,
    mean_tokens: float,
    sigma: float,
    limit: int,
    acceptance: float,
    prompt_tokens: int,
    seed: int,
) -> Workload:
    """The same by chance: every response is a draw of its own, and each that finishes is accepted
    with a probability that makes `acceptance` of all.
    """
    chance = random.Random(seed)
    middle = math.log(mean_tokens) - sigma * sigma / 2
    lengths = tuple(
        max(1, min(limit, round(math.exp(middle + sigma * chance.gauss(0.0, 1.0)))))
        for _ in range(num_responses)
    )
    finished = [n for n in lengths if n < limit]
    count = min(len(finished), round(acceptance * num_responses))
    kept = sorted(chance.sample(range(len(finished)), count))
    return Workload(
        lengths=lengths,
        accepted=tuple(finished[i] for i in kept),
        prompt_tokens=prompt_tokens,
        limit=limit,
    )


def quantiles(count: int, *, mean_tokens: float, sigma: float, limit: int) -> list[int]:
    """`count` evenly spaced quantiles in ascending order, each from 1 to `limit`."""
    middle = math.log(mean_tokens) - sigma * sigma / 2
    normal = NormalDist()
    exact = (
        math.exp(middle + sigma * normal.inv_cdf((i + 0.5) / count)) if sigma else mean_tokens
        for i in range(count)
    )
    return [max(1, min(limit, round(value))) for value in exact]


def shuffled(lengths: Sequence[int]) -> tuple[int, ...]:
    """The same ones in an order that says nothing, and always the same."""
    order = list(lengths)
    random.Random(0).shuffle(order)
    return tuple(order)


def mean_before_the_cut(measured: float, *, sigma: float, limit: int) -> float:
    """The mean of the log-normal whose mean after the cut at `limit` is `measured` (at most just
    below the limit).
    """
    low, high = 1.0, 100.0 * limit
    for _ in range(60):
        middle = math.sqrt(low * high)
        values = quantiles(200, mean_tokens=middle, sigma=sigma, limit=limit)
        low, high = (middle, high) if sum(values) / 200 < measured else (low, middle)
    return high
