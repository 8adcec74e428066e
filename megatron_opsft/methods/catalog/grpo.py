"""GRPO and Dr. GRPO."""

from typing import Literal

from megatron_opsft.methods.advantages import group_centered
from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.policy import Beta, GroupNormalizedSettings, PolicySettings
from megatron_opsft.methods.settings import AggregationKey, State


class Grpo(GroupNormalizedSettings):
    """GRPO's settings, with switches for reward and advantage."""

    formula = "r = 1[correct]; A = (r - mean)/std"
    paper = "DeepSeekMath, arXiv 2402.03300"
    name: Literal["grpo"] = "grpo"
    beta: Beta = 0.001
    reward: Literal["verdict", "truncation"] = "verdict"
    """1 if correct; truncation: if also within the limit."""
    advantage: Literal["group_normalized", "group_centered", "identity"] = (
        "group_normalized"
    )
    """(r - mean)/std, r - mean, or r itself."""

    @property
    def compares_group(self) -> bool:
        return self.advantage != "identity"

    @property
    def learns_from_rejected(self) -> bool:
        return self.compares_group or self.beta > 0

    def group_rewards(self, group: Group, state: State) -> list[float]:
        if self.reward == "truncation":
            return group.within(group.limit)
        return group.verdicts

    def group_advantages(self, group: Group, rewards: list[float]) -> list[float]:
        match self.advantage:
            case "group_normalized":
                return super().group_advantages(group, rewards)
            case "group_centered":
                return group_centered(rewards)
            case "identity":
                return rewards


class DrGrpo(PolicySettings):
    """Dr. GRPO's settings: GRPO without standard deviation, response length and divergence."""

    formula = "r = 1[correct]; A = r - mean; 1/(N L)"
    paper = "Understanding R1-Zero-Like Training, arXiv 2503.20783"
    name: Literal["dr_grpo"] = "dr_grpo"
    aggregation: AggregationKey = "constant"
