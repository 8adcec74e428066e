"""GRPO and Dr. GRPO, and the way from GRPO to on-policy SFT, one change at a time."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from megatron_opsft.methods.advantages import Values, group_centered, leave_one_out
from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.method import Method, centered, each_group, normalized
from megatron_opsft.methods.rewards import truncation, verdict
from megatron_opsft.methods.settings import (
    AggregationKey,
    Beta,
    GroupNormalizedSettings,
    MethodState,
    PolicySettings,
)

# Overrides of `method.name=grpo`, each on top of those before it; the last one is on-policy SFT.
TO_ON_POLICY_SFT = (
    "method.beta=0",
    "method.advantage=group_centered",
    "method.advantage=identity",
    "method.reward=truncation",
    "method.aggregation=max_accepted",
)


class GrpoSettings(GroupNormalizedSettings):
    """GRPO, its parts as switches."""

    name: Literal["grpo"] = "grpo"
    beta: Beta = 0.001
    reward: Literal["verdict", "truncation"] = Field(
        "verdict", description="1 if correct; truncation: if also within the limit."
    )
    advantage: Literal["group_normalized", "group_centered", "leave_one_out", "identity"] = Field(
        "group_normalized",
        description="(r - mean)/std, r - mean, r - mean of the others, or r itself.",
    )

    @property
    def compares_group(self) -> bool:
        return self.advantage != "identity"

    @property
    def learns_from_rejected(self) -> bool:
        return self.compares_group or self.beta > 0


class DrGrpoSettings(PolicySettings):
    """No standard deviation, no length of the response, no divergence."""

    name: Literal["dr_grpo"] = "dr_grpo"
    aggregation: AggregationKey = "constant"


def grpo_reward(group: Group, settings: GrpoSettings, state: MethodState) -> list[float]:
    """The verdict or the truncated one."""
    reward = verdict if settings.reward == "verdict" else truncation
    return reward(group, settings, state)


def grpo_advantage(batch: Sequence[Group], rewards: Values, settings: GrpoSettings) -> Values:
    """The one that is chosen."""
    if settings.advantage == "group_normalized":
        return normalized(batch, rewards, settings)
    if settings.advantage == "identity":
        return rewards
    function = group_centered if settings.advantage == "group_centered" else leave_one_out
    return [function(group) for group in rewards]


GRPO = Method(
    formula="r = 1[correct]; A = (r - mean)/std",
    paper="DeepSeekMath, arXiv 2402.03300",
    settings=GrpoSettings,
    reward=each_group(grpo_reward),
    advantage=grpo_advantage,
)
DR_GRPO = Method(
    formula="r = 1[correct]; A = r - mean; 1/(N L)",
    paper="Understanding R1-Zero-Like Training, arXiv 2503.20783",
    settings=DrGrpoSettings,
    reward=each_group(verdict),
    advantage=centered,
)
