"""The responses of a step as a plan assumes them: a log-normal, cut at the limit; pure."""

import math
from dataclasses import dataclass
from statistics import NormalDist

from megatron_opsft.config import Config

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
    """The responses of one step of all ranks, in ascending order.

    lengths: sampled tokens; trained: tokens of the responses that are trained on. prompt_tokens:
    mean of a prompt.
    """

    lengths: tuple[int, ...]
    trained: tuple[int, ...]
    prompt_tokens: int

    @property
    def mean_tokens(self) -> float:
        """Of a sampled response; 0 where none is sampled."""
        return sum(self.lengths) / len(self.lengths) if self.lengths else 0.0

    @property
    def sequences(self) -> list[int]:
        """Tokens of what is trained on, prompts included."""
        return [self.prompt_tokens + n for n in self.trained]


def quantiles(count: int, *, mean_tokens: float, sigma: float, limit: int) -> list[int]:
    """`count` evenly spaced quantiles of a log-normal in ascending order, each from 1 to `limit`.

    mean_tokens, sigma: of the log-normal before it is cut.
    """
    normal, middle = NormalDist(), math.log(mean_tokens) - sigma * sigma / 2
    deviations = (normal.inv_cdf((i + 0.5) / count) for i in range(count))
    return [max(1, min(limit, round(math.exp(middle + sigma * d)))) for d in deviations]


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


def make_workload(
    config: Config,
    *,
    mean_tokens: float | None = None,
    sigma: float = DEFAULT_SIGMA,
    acceptance: float = PAPER_ACCEPTANCE,
    prompt_tokens: int = DEFAULT_PROMPT_TOKENS,
) -> Workload:
    """One step of a run. mean_tokens, sigma: of the log-normal before it is cut, by default the
    paper's end, and below the paper's limit as far below it; acceptance: share of all responses
    that is correct and finished. No more are accepted than finish, and their lengths are spread
    over those of all that do.
    """
    limit = config.rollout.max_response_tokens
    count = config.data.prompts_per_step * config.rollout.group_size
    mean_tokens = mean_tokens or PAPER_MEAN_TOKENS * min(1.0, limit / PAPER_LIMIT)
    lengths = quantiles(count, mean_tokens=mean_tokens, sigma=sigma, limit=limit)
    finished = [n for n in lengths if n < limit]
    accepted = min(len(finished), round(acceptance * count))
    return learned_by(
        config,
        lengths,
        [finished[int((i + 0.5) * len(finished) / accepted)] for i in range(accepted)],
        min(prompt_tokens, config.data.max_prompt_tokens),
    )


def learned_by(
    config: Config, lengths: list[int], accepted: list[int], prompt_tokens: int
) -> Workload:
    """What the run's method samples and trains on; accepted: what on-policy SFT would train on.

    A policy gradient trains on all responses, at most: without a divergence groups of equal rewards
    are left out. With fixed data none is sampled, and as many finished ones are trained on.
    """
    trained = accepted
    if config.method.has_fixed_data:
        finished = [n for n in lengths if n < config.rollout.max_response_tokens] or lengths
        trained = [finished[i * len(finished) // len(lengths)] for i in range(len(lengths))]
        lengths = []
    elif config.method.learns_from_rejected:
        trained = lengths
    return Workload(lengths=tuple(lengths), trained=tuple(trained), prompt_tokens=prompt_tokens)
