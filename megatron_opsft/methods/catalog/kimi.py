"""Kimi k1.5's length penalty, and its update with a squared log-ratio."""

from typing import Literal

from pydantic import Field

from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.objective import Likelihood, SquaredLogRatio, Surrogate
from megatron_opsft.methods.settings import AggregationKey, MethodState, PolicySettings


class Kimi(PolicySettings):
    """The report gives neither weight nor tau nor warm-up."""

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
        one = self.updates_per_batch == 1
        return Likelihood() if one else SquaredLogRatio(tau=self.tau)

    def group_rewards(self, group: Group, state: MethodState) -> list[float]:
        """c + w x, x = 1/2 - (n - min)/(max - min); of a wrong one at most 0."""
        shortest, longest = min(group.lengths), max(group.lengths)
        if state.step <= self.warmup_steps or shortest == longest:
            return group.verdicts
        scores = [
            0.5 - (length - shortest) / (longest - shortest) for length in group.lengths
        ]
        return [
            correct + self.weight * (score if correct else min(0.0, score))
            for correct, score in zip(group.verdicts, scores, strict=True)
        ]
