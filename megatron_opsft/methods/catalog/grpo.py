"""GRPO, Dr. GRPO and GFPO."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from megatron_opsft.errors import UserError
from megatron_opsft.methods.advantages import group_centered, group_normalized
from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.policy import Beta, GroupNormalizedSettings, PolicySettings
from megatron_opsft.methods.settings import AggregationKey, RunSize, State


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
        """Advantages as `advantage` says: (r - mean)/std, r - mean, or r itself."""
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


class Gfpo(GroupNormalizedSettings):
    """GFPO: keeps the short or the efficient responses to a problem, and compares these alone."""

    formula = "A = (r - mean)/std of the k shortest responses, or of largest r/n; 0 of the others"
    paper = "GFPO, arXiv 2508.09726"
    measures_length = True
    name: Literal["gfpo"] = "gfpo"
    kept: int = Field(4, ge=2)
    """k: how many responses to each problem are kept."""
    keep_by: Literal["length", "reward_per_token"] = "length"
    """The shortest are kept, or those with the most reward per token."""

    def check(self, run: RunSize) -> None:
        """Check also that there are as many responses as are kept."""
        super().check(run)
        if self.kept > run.group_size:
            raise UserError(
                f"method.kept={self.kept} is more than the responses to a problem, "
                f"rollout.group_size={run.group_size}; lower it"
            )

    def group_advantages(self, group: Group, rewards: list[float]) -> list[float]:
        """(r - mean)/(std + epsilon) among those kept, std divided by their count; others 0."""
        costs: Sequence[float] = group.lengths
        if self.keep_by == "reward_per_token":
            pairs = zip(rewards, group.lengths, strict=True)
            costs = [-reward / max(length, 1) for reward, length in pairs]
        cheapest_first = sorted(range(len(costs)), key=costs.__getitem__)
        kept_indices = cheapest_first[: self.kept]
        kept_rewards = [rewards[index] for index in kept_indices]
        normalized = group_normalized(kept_rewards, self.std_epsilon, count_less=0)
        advantages = [0.0] * len(rewards)
        for index, advantage in zip(kept_indices, normalized, strict=True):
            advantages[index] = advantage
        return advantages
