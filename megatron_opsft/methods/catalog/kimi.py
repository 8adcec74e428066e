"""Kimi k1.5's length penalty, and its update with a squared log-ratio."""

from typing import Literal

from pydantic import Field

from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.objective import SquaredLogRatio, Surrogate
from megatron_opsft.methods.policy import PolicySettings
from megatron_opsft.methods.settings import AggregationKey, MethodState


class Kimi(PolicySettings):
    """Kimi k1.5's settings. The report states neither weight nor tau nor warm-up: ours."""

    formula = "r = 1[correct] + w (1/2 - (n - min)/(max - min)), of wrong ones <= 0; A = r - mean"
    paper = "Kimi k1.5, arXiv 2501.12599"
    name: Literal["kimi"] = "kimi"
    aggregation: AggregationKey = "sequence_sum"
    weight: float = Field(1.0, ge=0)
    """Weight of the length reward."""
    warmup_steps: int = Field(0, ge=0)
    """Steps without the length reward."""
    tau: float = Field(0.1, ge=0)
    """Of A log p - tau/2 (log p/old)^2 of whole responses; without effect in the first update."""

    @property
    def surrogate(self) -> Surrogate:
        return SquaredLogRatio(tau=self.tau)

    def group_rewards(self, group: Group, state: MethodState) -> list[float]:
        """c + w x, x = 1/2 - (n - min)/(max - min); x is at most 0 for a wrong answer."""
        shortest, longest = min(group.lengths), max(group.lengths)
        if state.step <= self.warmup_steps or shortest == longest:
            return group.verdicts
        rewards = []
        for response in group.responses:
            score = 0.5 - (response.num_tokens - shortest) / (longest - shortest)
            if not response.correct:
                score = min(0.0, score)
            rewards.append(response.correct + self.weight * score)
        return rewards
