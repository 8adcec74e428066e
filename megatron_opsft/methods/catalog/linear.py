"""prime-rl's linear length penalty."""

from typing import Literal

from pydantic import Field

from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.policy import PolicySettings
from megatron_opsft.methods.settings import State


class Linear(PolicySettings):
    """Settings of prime-rl's `linear`."""

    formula = "r = 1[correct] - 0.25 pass_rate n/max n; A = r - mean"
    paper = "prime-rl, pull request 2901"
    name: Literal["linear"] = "linear"
    weight: float = Field(0.25, ge=0)
    """Weight of the length penalty."""
    only_correct: bool = False
    """Only correct responses pay it (prime-rl, pull request 3376)."""

    def group_rewards(self, group: Group, state: State) -> list[float]:
        """c - w pass_rate n / max n; 0 for a wrong response if only correct ones pay."""
        price = self.weight * group.pass_rate / max(group.lengths)
        rewards = []
        for response in group.responses:
            reward = float(response.correct)
            if response.correct or not self.only_correct:
                reward -= price * response.num_tokens
            rewards.append(reward)
        return rewards
