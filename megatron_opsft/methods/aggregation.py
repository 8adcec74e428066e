"""How the token losses of a batch become one loss: a weight for each response's tokens and one
factor for the whole batch.

With N sampled responses of n_i tokens, of which some are accepted (their advantage is not 0), and
M the longest accepted one:

| name              | weight of a token | factor                  |                              |
|-------------------|-------------------|-------------------------|------------------------------|
| `max_accepted`    | 1                 | 1 / (N M)               | Algorithm 1 of on-policy SFT |
| `accepted_tokens` | 1                 | 1 / sum of accepted n_i | its released code            |
| `all_tokens`      | 1                 | 1 / sum of all n_i      | verl's token mean, DAPO      |
| `sequence`        | 1 / n_i           | 1 / N                   | GRPO's paper; the ablation   |
|                   |                   |                         | of on-policy SFT's           |
| `sequence_sum`    | 1                 | 1 / N                   | whole responses              |
| `constant`        | 1                 | 1 / (N limit)           | Dr. GRPO                     |

Weights are applied as losses are summed, the factor once, to the accumulated gradient before
clipping; both are of the whole optimizer batch, so that micro-batches cannot matter.
"""

from collections.abc import Sequence
from typing import Literal

Aggregation = Literal[
    "max_accepted", "accepted_tokens", "all_tokens", "sequence", "sequence_sum", "constant"
]


def aggregate(
    name: Aggregation, lengths: Sequence[int], accepted: Sequence[bool], limit: int
) -> tuple[tuple[float, ...], float]:
    """(weight of each response's tokens, factor); the factor is 0 where it divides by nothing.

    lengths: tokens of every sampled response; accepted: whether it has an advantage; limit: the
    longest that a response could be.
    """
    if name == "sequence":
        weights = tuple(1.0 / length for length in lengths)
    else:
        weights = (1.0,) * len(lengths)
    kept = [length for length, is_kept in zip(lengths, accepted, strict=True) if is_kept]
    divisor = {
        "max_accepted": len(lengths) * max(kept, default=0),
        "accepted_tokens": sum(kept),
        "all_tokens": sum(lengths),
        "sequence": len(lengths),
        "sequence_sum": len(lengths),
        "constant": len(lengths) * limit,
    }[name]
    return weights, 1.0 / divisor if divisor else 0.0
