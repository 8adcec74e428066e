"""DDCA: an advantage of length among the correct responses alone, as strong as the pass rate."""

from collections.abc import Sequence
from statistics import fmean
from typing import Literal

from pydantic import Field

from megatron_opsft.methods.advantages import Values
from megatron_opsft.methods.catalog.er_rl import sigmoid_of_length
from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.settings import GroupNormalizedSettings


class Ddca(GroupNormalizedSettings):
    """DDCA's settings."""

    formula = "A = (r - mean)/std - 0.2 pass_rate (s - mean s) if correct, s = sigma((n - mu)/std)"
    paper = "DDCA, arXiv 2602.02099"
    name: Literal["ddca"] = "ddca"
    length_weight: float = Field(0.2, ge=0)
    """Weight of the length advantage."""

    def advantages(self, batch: Sequence[Group], rewards: Values) -> Values:
        """(r - mean)/std - w pass_rate (s - mean s), s = sigma((n - mu)/std), of correct ones."""
        advantages = super().advantages(batch, rewards)
        for group, values in zip(batch, advantages, strict=True):
            if not group.num_correct:
                continue
            weight = self.length_weight * group.pass_rate
            scores = sigmoid_of_length(group)
            mean = fmean(scores)
            scores_of_correct = iter(scores)
            for i, response in enumerate(group.responses):
                if response.correct:
                    values[i] -= weight * (next(scores_of_correct) - mean)
        return advantages
