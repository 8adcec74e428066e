"""DDCA: an advantage of length among the correct responses alone, as strong as the pass rate."""

from statistics import fmean
from typing import Literal

from pydantic import Field

from megatron_opsft.methods.catalog.er_rl import sigmoid_of_length
from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.policy import GroupNormalizedSettings


class Ddca(GroupNormalizedSettings):
    """DDCA's settings."""

    formula = "A = (r - mean)/std - 0.2 pass_rate (s - mean s) if correct, s = sigma((n - mu)/std)"
    paper = "DDCA, arXiv 2602.02099"
    name: Literal["ddca"] = "ddca"
    length_weight: float = Field(0.2, ge=0)
    """Weight of the length advantage."""

    def group_advantages(self, group: Group, rewards: list[float]) -> list[float]:
        """(r - mean)/std - w pass_rate (s - mean s), s = sigma((n - mu)/std), of correct ones."""
        advantages = super().group_advantages(group, rewards)
        scores = sigmoid_of_length(group)
        if scores:
            mean = fmean(scores.values())
            weight = self.length_weight * group.pass_rate
            for i, score in scores.items():
                advantages[i] -= weight * (score - mean)
        return advantages
