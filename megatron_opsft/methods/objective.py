"""What a method makes of a response token's log-probability: its objective, as plain numbers.

The loss of a batch is, over its trained responses i and their tokens t,

    factor * sum_i w_i sum_t [ -surrogate(A_i, log p_t, log old_t) + beta k(log p_t, log ref_t) ]

with the advantage A_i, and the weights w_i and the factor of `aggregate`. old: the policy that
sampled, as it was before the batch's first update; ref: the reference model. `loss.surrogates` has
the formulas.

Of N sampled responses of n_i tokens, of which some are accepted (their advantage is not 0), and
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
from dataclasses import dataclass, field
from typing import Literal

KlEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Likelihood:
    """A log p: no policy but the current one takes part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenClip:
    """PPO's: the token's ratio p / old counts within [1 - low, 1 + high].

    dual: what a negative advantage is multiplied with at most, above 1; None: any ratio.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceClip:
    """O1-Pruner's: clips a whole response, by the geometric mean of its tokens' ratios.

    It counts once for a response: each of n tokens has 1 / n of it.
    """

    low: float = 0.2
    high: float = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class SquaredLogRatio:
    """Kimi k1.5's: A log p - tau / 2 (log p - log old)^2, both of the whole response."""

    tau: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """likelihood A log p - beta KL(p || q) over the whole vocabulary, q the teacher's: the same
    model's earlier weights under another prompt. forward: KL(q || p) instead.
    """

    beta: float = 1.0
    likelihood: float = 0.0
    forward: bool = False


Surrogate = Likelihood | TokenClip | SequenceClip | SquaredLogRatio | Distillation


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPenalty:
    """The divergence from the reference model as a penalty that each token pays for itself and for
    what follows: its advantage is A - beta sum_{s >= t} (log old - log ref)_s.
    """

    beta: float
    whitens: bool
    """Whether the advantages are whitened over all tokens of the batch afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What a token's loss is made of."""

    surrogate: Surrogate = field(default_factory=Likelihood)
    beta: float = 0.0
    """Factor of the divergence from the reference model in the loss."""
    kl: KlEstimator = "k3"
    """Estimator of that divergence."""
    token_penalty: TokenPenalty | None = None
    """The divergence in the advantages, in place of the loss."""
    temperature: float = 1.0
    """All log-probabilities are those of softmax(logits / temperature)."""

    @property
    def is_weighted_likelihood(self) -> bool:
        """Whether the advantage can go into a token's weight, and nothing else is needed."""
        return isinstance(self.surrogate, Likelihood) and not self.needs_reference

    @property
    def has_teacher(self) -> bool:
        """Whether distributions are drawn to a teacher's."""
        return isinstance(self.surrogate, Distillation)

    @property
    def keeps_frozen_model(self) -> bool:
        """Whether a run has a frozen copy of the model: a reference, or a teacher."""
        return self.needs_reference or self.has_teacher

    @property
    def needs_reference(self) -> bool:
        """Whether a divergence from the reference model counts, so that every response does."""
        return self.beta > 0 or self.token_penalty is not None

    @property
    def clips(self) -> bool:
        """Whether a token's gradient can be cut off."""
        return isinstance(self.surrogate, TokenClip | SequenceClip)


LIKELIHOOD = Objective()


Aggregation = Literal[
    "max_accepted",
    "accepted_tokens",
    "all_tokens",
    "sequence",
    "sequence_sum",
    "constant",
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
    kept = [
        length for length, is_kept in zip(lengths, accepted, strict=True) if is_kept
    ]
    divisor = {
        "max_accepted": len(lengths) * max(kept, default=0),
        "accepted_tokens": sum(kept),
        "all_tokens": sum(lengths),
        "sequence": len(lengths),
        "sequence_sum": len(lengths),
        "constant": len(lengths) * limit,
    }[name]
    return weights, 1.0 / divisor if divisor else 0.0
