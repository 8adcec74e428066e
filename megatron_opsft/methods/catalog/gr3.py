"""GR3: divides a reward by a price that grows with n / mean n, the mean of the group."""

from collections.abc import Sequence
from statistics import fmean
from typing import Literal

from pydantic import Field

from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.policy import GroupNormalizedSettings
from megatron_opsft.methods.settings import State


class Gr3(GroupNormalizedSettings):
    """GR3's settings. The authors choose alpha in a short run beforehand; here it is a key."""

    formula = "r = 1[correct] / (1 + alpha n/mean n)"
    paper = "GR3, arXiv 2603.10535"
    name: Literal["gr3"] = "gr3"
    alpha: float = Field(0.33, ge=0)
    """How much length costs; for chat 0.00133."""

    def group_rewards(self, group: Group, state: State) -> list[float]:
        """c / (1 + alpha n / mean n), the mean over right and wrong responses."""
        mean = fmean(group.lengths)
        return [
            r.correct / (1 + self.alpha * r.num_tokens / mean) for r in group.responses
        ]

    def keeps(self, group: Group, rewards: Sequence[float]) -> bool:
        """Drop also groups in which all are correct: a right answer of mean length would lose."""
        return group.pass_rate < 1 and super().keeps(group, rewards)
