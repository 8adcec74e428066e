"""Mastery-gated length penalty: only where every response to the problem is correct."""

from statistics import median
from typing import Literal

from pydantic import Field

from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.settings import GroupNormalizedSettings, State


class MasteryGated(GroupNormalizedSettings):
    """The weight is not known."""

    formula = "all correct: r = 1 - w (n - median)+/(max - median), else 1[correct]"
    paper = "CoT Compression with One-Domain-to-All Generalization, arXiv 2601.06052"
    name: Literal["mastery_gated"] = "mastery_gated"
    weight: float = Field(1.0, ge=0)
    """Weight of the length penalty."""

    def group_rewards(self, group: Group, state: State) -> list[float]:
        """c - w (n - median)/(max - median) beyond the median, if all are correct."""
        if group.pass_rate < 1:
            return group.verdicts
        middle, longest = median(group.lengths), max(group.lengths)
        return [
            1 - self.weight * (n - middle) / (longest - middle) if n > middle else 1.0
            for n in group.lengths
        ]
