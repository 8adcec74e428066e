"""How token losses become one loss: a weight for each token and one factor for the global batch.

With B problems, G responses each, accepted responses o_i and M = max |o_i|, the loss is
`factor * sum_i sum_t weight_i * (-log p(o_i,t))`:

| mode         | weight_i  | factor         |                                                     |
|--------------|-----------|----------------|-----------------------------------------------------|
| `batch_max`  | 1         | 1 / (B G M)    | the paper's Algorithm 1                             |
| `response`   | 1 / |o_i| | 1 / (B G)      | the paper's ablation, which collapses               |
| `token_mean` | 1         | 1 / sum |o_i|  | the released code's, over the global batch instead  |
|              |           |                | of each micro-batch, so that packing cannot matter  |

Weights are applied as losses are summed; the factor once, to the accumulated gradient before
clipping.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Mode = Literal["batch_max", "response", "token_mean"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalization:
    """token_weights[i]: the weight of every token of response i; factor: of the whole sum."""

    token_weights: tuple[float, ...]
    factor: float


def normalize(lengths: Sequence[int], num_rollouts: int, mode: Mode) -> Normalization:
    """lengths: response tokens of every accepted response of the global batch; num_rollouts: B * G,
    all sampled ones.

    Pure, so every rank that knows the same lengths gets the same numbers. With no response the
    factor is 0.
    """
    ones = (1.0,) * len(lengths)
    if not lengths:
        return Normalization(token_weights=(), factor=0.0)
    if mode == "batch_max":
        return Normalization(token_weights=ones, factor=1.0 / (num_rollouts * max(lengths)))
    if mode == "response":
        weights = tuple(1.0 / length for length in lengths)
        return Normalization(token_weights=weights, factor=1.0 / num_rollouts)
    return Normalization(token_weights=ones, factor=1.0 / sum(lengths))


# What `method.aggregation` calls them.
MODES: dict[str, Mode] = {
    "max_accepted": "batch_max",
    "sequence": "response",
    "accepted_tokens": "token_mean",
}
