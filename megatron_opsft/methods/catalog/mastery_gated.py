"""Mastery-gated length penalty: paid only if every response to the problem is correct."""

from statistics import median
from typing import Literal

from pydantic import Field

from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.policy import GroupNormalizedSettings
from megatron_opsft.methods.settings import State


class MasteryGated(GroupNormalizedSettings):
    """Settings. The paper does not state the weight of the penalty; 1.0 is our choice."""

    formula = "all correct: r = 1 - w (n - median)+/(max - median), else 1[correct]"
    paper = "CoT Compression with One-Domain-to-All Generalization, arXiv 2601.06052"
    name: Literal["mastery_gated"] = "mastery_gated"
    weight: float = Field(1.0, ge=0)
    """Weight of the length penalty."""

    def group_rewards(self, group: Group, state: State) -> list[float]:
        """1 - w (n - median)+/(max - median) if all are correct, else 1[correct]."""
        rewards = group.verdicts
        if group.pass_rate < 1:
            return rewards
        middle = median(group.lengths)
        spread = max(group.lengths) - middle
        for i, length in enumerate(group.lengths):
            if length > middle:
                rewards[i] = 1 - self.weight * (length - middle) / spread
        return rewards
