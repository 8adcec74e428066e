"""The responses of a step as a plan assumes them: a log-normal, cut at the limit; pure."""

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

# What on-policy SFT ends at with R1-Distill-1.5B: mean tokens and accuracy over five benchmarks
# (the paper's main table); it starts at 10,178 tokens, most of them cut off by the limit.
PAPER_MEAN_TOKENS = 2186.0
PAPER_LIMIT = 3500
PAPER_ACCEPTANCE = 0.599
# Standard deviation of the logarithm, of 20 published responses of R1-Distill-7B to MATH-500.
DEFAULT_SIGMA = 0.94
# Mean of a prompt, template included. Assumption.
DEFAULT_PROMPT_TOKENS = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The responses of one step of all ranks.

    lengths: sampled tokens, in the order in which they are asked for. accepted: those of the
    responses trained on, which may not be accepted at all (`plan.learning`). prompt_tokens: mean of
    a prompt; limit: of a response.
    """

    lengths: tuple[int, ...]
    accepted: tuple[int, ...]
    prompt_tokens: int
    limit: int

    @property
    def sampled_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def mean_tokens(self) -> float:
        """Of a sampled response; 0 where none is sampled."""
        return self.sampled_tokens / len(self.lengths) if self.lengths else 0.0

    @property
    def trained_tokens(self) -> int:
        """Prompts included."""
        return sum(self.accepted) + self.prompt_tokens * len(self.accepted)


def usual_mean_tokens(limit: int) -> float:
    """The mean where nobody gives one: the paper's end; below the paper's limit as far below it."""
    return PAPER_MEAN_TOKENS * min(1.0, limit / PAPER_LIMIT)


def make_workload(
    num_responses: int,
    *,
    mean_tokens: float,
    sigma: float,
    limit: int,
    acceptance: float,
    prompt_tokens: int,
    seed: int | None = None,
) -> Workload:
    """mean_tokens, sigma: of the log-normal before it is cut; acceptance: share of all responses
    that is correct and finished. No more are accepted than finish, and their lengths are spread
    over those of all that do.

    seed: of the draws; None: evenly spaced quantiles, so that the same plan gives the same numbers.
    """
    if seed is None:
        ordered = quantiles(num_responses, mean_tokens=mean_tokens, sigma=sigma, limit=limit)
    else:
        chance = random.Random(seed)
        deviations = sorted(chance.gauss(0.0, 1.0) for _ in range(num_responses))
        ordered = _log_normal(deviations, mean_tokens=mean_tokens, sigma=sigma, limit=limit)
    finished = [n for n in ordered if n < limit]
    count = min(len(finished), round(acceptance * num_responses))
    return Workload(
        lengths=shuffled(ordered),
        accepted=tuple(finished[int((i + 0.5) * len(finished) / count)] for i in range(count)),
        prompt_tokens=prompt_tokens,
        limit=limit,
    )


def quantiles(count: int, *, mean_tokens: float, sigma: float, limit: int) -> list[int]:
    """`count` evenly spaced quantiles in ascending order, each from 1 to `limit`."""
    normal = NormalDist()
    deviations = [normal.inv_cdf((i + 0.5) / count) for i in range(count)]
    return _log_normal(deviations, mean_tokens=mean_tokens, sigma=sigma, limit=limit)


def _log_normal(
    deviations: list[float], *, mean_tokens: float, sigma: float, limit: int
) -> list[int]:
    """Lengths that are so many standard deviations from the middle, cut at the limit."""
    middle = math.log(mean_tokens) - sigma * sigma / 2
    return [max(1, min(limit, round(math.exp(middle + sigma * d)))) for d in deviations]


def shuffled(lengths: list[int]) -> tuple[int, ...]:
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
