"""The base classes of methods with a policy gradient, and DAPO's two additions to any of them
(arXiv 2503.14476): draw other problems in place of groups whose rewards are all equal, and lower
the rewards of responses near the length limit.
"""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from megatron_opsft.errors import UserError
from megatron_opsft.methods.advantages import group_centered, group_normalized
from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.objective import (
    KlEstimator,
    Likelihood,
    Objective,
    Surrogate,
    TokenClip,
)
from megatron_opsft.methods.settings import (
    AggregationKey,
    MethodSettings,
    RunSize,
    State,
)

# Keys of several methods, whose defaults differ.
MaxRefills = Annotated[
    int,
    Field(
        ge=0,
        description="How often problems are drawn again, at most, in place of groups of equal "
        "rewards; a batch that is not full then stays smaller. 0: never.",
    ),
]
ClipHigh = Annotated[float, Field(ge=0, description="... to 1 + this.")]
DualClip = Annotated[
    float | None,
    Field(
        gt=1,
        description="Bound on the ratio by which a negative advantage is multiplied; null: none.",
    ),
]
Beta = Annotated[
    float,
    Field(
        ge=0,
        description="Weight of the divergence from the reference model; 0: none is kept.",
    ),
]
Kl = Annotated[
    KlEstimator,
    Field(
        description="Its estimator, d = log ref - log p: k1 -d, k2 d^2/2, k3 e^d - d - 1."
    ),
]


class PolicySettings(MethodSettings):
    """Methods with a policy gradient: clipped ratios, a divergence, several updates on one batch.

    Their advantage is Dr. GRPO's: r - mean. DAPO's additions are off by default; whether a group is
    kept is decided before the overlong penalty is applied.
    """

    aggregation: AggregationKey = "all_tokens"
    max_refills: MaxRefills = 0
    overlong_buffer: NonNegativeInt = 0
    """Over this many tokens before the length limit every reward falls, right or wrong, in a
    straight line (DAPO); 0: none falls.
    """
    overlong_penalty: NonNegativeFloat = 1.0
    """What a reward loses at the limit, by method.overlong_buffer."""
    clip_low: float = Field(0.2, ge=0, le=1)
    """A token's ratio to the old policy counts from 1 - this ..."""
    clip_high: ClipHigh = 0.2
    dual_clip: DualClip = None
    beta: Beta = 0.0
    kl: Kl = "k3"
    updates_per_batch: int = Field(1, ge=1)
    """Optimizer steps on each rollout batch, on equal shares of its problems."""
    tempered_log_probs: bool = True
    """Log-probs are those of softmax(logits / rollout.temperature), the policy that samples; else
    of softmax(logits).
    """

    @property
    def has_length(self) -> bool:
        return self.measures_length or self.overlong_buffer > 0

    @property
    def num_updates(self) -> int:
        return self.updates_per_batch

    @property
    def most_refills(self) -> int:
        return self.max_refills

    @property
    def compares_group(self) -> bool:
        return True

    @property
    def learns_from_rejected(self) -> bool:
        return True

    @property
    def surrogate(self) -> Surrogate:
        """The clipped ratio; what takes its place if each batch has several updates."""
        return TokenClip(low=self.clip_low, high=self.clip_high, dual=self.dual_clip)

    def objective(self, sampling_temperature: float) -> Objective:
        """The surrogate, or likelihood if each batch has one update.

        In a batch's only update every ratio is 1, so a clip would have the gradient of the
        likelihood at a higher price.
        """
        return Objective(
            surrogate=self.surrogate if self.updates_per_batch > 1 else Likelihood(),
            beta=self.beta,
            kl=self.kl,
            temperature=sampling_temperature if self.tempered_log_probs else 1.0,
        )

    def check(self, run: RunSize) -> None:
        """Check also DAPO's keys, and that the updates of a batch get equally many problems."""
        super().check(run)
        if self.max_refills and not self.compares_group:
            raise UserError(
                f"method.max_refills={self.max_refills} replaces groups of equal rewards, and the "
                "method learns from these as well; set it to 0"
            )
        longest = 0 if self.has_fixed_data else run.max_response_tokens
        if self.overlong_buffer > longest:
            raise UserError(
                f"method.overlong_buffer={self.overlong_buffer} is more than the {longest} tokens "
                "that a sampled response can have; lower it"
            )
        if run.prompts_per_step % self.updates_per_batch:
            raise UserError(
                f"method.updates_per_batch={self.updates_per_batch} does not divide "
                f"data.prompts_per_step={run.prompts_per_step}; choose a divisor"
            )

    def group_rewards(self, group: Group, state: State) -> list[float]:
        """1 if correct."""
        return group.verdicts

    def keeps(self, group: Group, rewards: Sequence[float]) -> bool:
        """True if the rewards differ, or if the run draws no problems again."""
        return not self.max_refills or min(rewards) < max(rewards)

    def shaped(self, group: Group, rewards: list[float]) -> list[float]:
        """Add penalty x R_len to every reward (DAPO's equation 13). R_len is 0 up to the buffer
        before the limit, and falls to -1 at the limit.
        """
        if not self.overlong_buffer:
            return rewards
        buffer_start = group.limit - self.overlong_buffer
        shaped = []
        for reward, length in zip(rewards, group.lengths, strict=True):
            share = (buffer_start - length) / self.overlong_buffer
            length_reward = min(max(share, -1.0), 0.0)
            shaped.append(reward + self.overlong_penalty * length_reward)
        return shaped

    def group_advantages(self, group: Group, rewards: list[float]) -> list[float]:
        return group_centered(rewards)


class GroupNormalizedSettings(PolicySettings):
    """Methods with GRPO's advantage, (r - mean) / std."""

    std_epsilon: NonNegativeFloat = 1e-6
    """Added to a group's standard deviation; verl 1e-6, TRL 1e-4."""

    def group_advantages(self, group: Group, rewards: list[float]) -> list[float]:
        return group_normalized(rewards, self.std_epsilon)
