"""The objective of a method as plain numbers: what its loss makes of each token's log-probability.

The loss of a batch is, over its trained responses i and their tokens t,

    factor * sum_i w_i sum_t [ -surrogate(A_i, log p_t, log old_t) + beta k(log p_t, log ref_t) ]

with the advantage A_i, and w_i and factor from `aggregate`. old: the policy that sampled, as it was
before the batch's first update; ref: the reference model. `trainer.loss.token_losses` has the
formulas.

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
from itertools import compress
from typing import Literal

from megatron_opsft.records import record

KlEstimator = Literal["k1", "k2", "k3"]


@record
class Likelihood:
    """The plain policy gradient: the surrogate is A log p, advantage times log-probability, with no
    ratio to an older policy.
    """


@record
class TokenClip:
    """PPO's surrogate: the token's ratio p / old is clipped to [1 - low, 1 + high]."""

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    """Largest ratio, above 1, that a negative advantage is multiplied by; None: no bound."""


@record
class SequenceClip:
    """O1-Pruner's surrogate: one clipped ratio a response, the geometric mean of the tokens'.

    The response counts once: each of its n tokens has 1 / n of it.
    """

    low: float = 0.2
    high: float = 0.2


@record
class SquaredLogRatio:
    """Kimi k1.5's surrogate of a whole response: A log p - tau / 2 (log p - log old)^2, where log p
    and log old are the sums over its tokens.
    """

    tau: float


@record
class Distillation:
    """Self-distillation: likelihood x A log p - beta x KL(p || q) over the whole vocabulary.

    q is the teacher's distribution: earlier weights of the same model under another prompt.
    """

    beta: float = 1.0
    likelihood: float = 0.0
    forward: bool = False
    """KL(q || p) in place of KL(p || q)."""


Surrogate = Likelihood | TokenClip | SequenceClip | SquaredLogRatio | Distillation


@record
class TokenPenalty:
    """The divergence from the reference model as a penalty in the advantages.

    Each token pays for itself and for the tokens after it: its advantage is
    A - beta sum_{s >= t} (log old - log ref)_s.
    """

    beta: float
    whitens: bool
    """True if the advantages are then whitened over all tokens of the batch."""


@record
class Objective:
    """The terms of a token's loss."""

    surrogate: Surrogate = Likelihood()
    beta: float = 0.0
    """Weight of the divergence from the reference model in the loss."""
    kl: KlEstimator = "k3"
    """Estimator of that divergence."""
    token_penalty: TokenPenalty | None = None
    """The divergence as a penalty in the advantages, in place of the loss."""
    temperature: float = 1.0
    """All log-probabilities are those of softmax(logits / temperature)."""

    @property
    def is_weighted_likelihood(self) -> bool:
        """True if the loss is -w_t A log p_t alone, so that A can be part of the token's weight."""
        return isinstance(self.surrogate, Likelihood) and not self.needs_reference

    @property
    def has_teacher(self) -> bool:
        """True if the loss has a divergence from a teacher's distributions."""
        return isinstance(self.surrogate, Distillation)

    @property
    def keeps_frozen_model(self) -> bool:
        """True if a run keeps a frozen copy of the model: a reference, or a teacher."""
        return self.needs_reference or self.has_teacher

    @property
    def needs_reference(self) -> bool:
        """True if the divergence from the reference model counts, for every response."""
        return self.beta > 0 or self.token_penalty is not None

    @property
    def clips(self) -> bool:
        """True if a token's gradient can be clipped to 0."""
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
    """Return the weight of each response's tokens, and the one factor of the sum.

    The factor is 0 if it would divide by 0. lengths: tokens of every sampled response. accepted:
    True for a response with an advantage. limit: most tokens that a response could have.
    """
    weights = (1.0,) * len(lengths)
    if name == "sequence":
        weights = tuple(1.0 / length for length in lengths)
    accepted_lengths = list(compress(lengths, accepted))
    divisor = {
        "max_accepted": len(lengths) * max(accepted_lengths, default=0),
        "accepted_tokens": sum(accepted_lengths),
        "all_tokens": sum(lengths),
        "sequence": len(lengths),
        "sequence_sum": len(lengths),
        "constant": len(lengths) * limit,
    }[name]
    if divisor == 0:
        return weights, 0.0
    return weights, 1.0 / divisor
