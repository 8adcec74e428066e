"""GFPO: keeps the short or the efficient responses to a problem, and compares these alone."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from megatron_opsft.errors import UserError
from megatron_opsft.methods.advantages import group_normalized
from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.policy import GroupNormalizedSettings
from megatron_opsft.methods.settings import RunSize


class Gfpo(GroupNormalizedSettings):
    """GFPO's settings."""

    formula = "A = (r - mean)/std of the k shortest responses, or of largest r/n; 0 of the others"
    paper = "GFPO, arXiv 2508.09726"
    name: Literal["gfpo"] = "gfpo"
    kept: int = Field(4, ge=2)
    """k: how many responses to each problem are kept."""
    keep_by: Literal["length", "reward_per_token"] = "length"
    """The shortest are kept, or those with most reward a token."""

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
            costs = [-reward / length for reward, length in pairs]
        kept = sorted(range(len(costs)), key=costs.__getitem__)[: self.kept]
        kept_rewards = [rewards[i] for i in kept]
        normalized = group_normalized(kept_rewards, self.std_epsilon, count_less=0)
        advantages = [0.0] * len(rewards)
        for i, advantage in zip(kept, normalized, strict=True):
            advantages[i] = advantage
        return advantages
