"""DLER: truncation, an advantage whitened over the batch, and problems drawn again in place of
groups that teach nothing.
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from megatron_opsft.methods.advantages import Values, whiten
from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.policy import Beta, ClipHigh, Kl, MaxRefills, PolicySettings
from megatron_opsft.methods.settings import State


class Dler(PolicySettings):
    """DLER's settings, the paper's; the authors' code has `kl` k3 by default."""

    formula = "r = 1[correct and n <= L]; A = whitened over the batch (r - mean)"
    paper = "DLER, arXiv 2510.15110"
    missable = "easy_limit"
    name: Literal["dler"] = "dler"
    clip_high: ClipHigh = 0.28
    beta: Beta = 0.0005
    kl: Kl = "k2"
    whiten: Literal["responses", "tokens"] = "tokens"
    """Whether a response counts once, or once for each token (the authors' code)."""
    max_refills: MaxRefills = 8
    easy_limit: int = Field(0, ge=0)
    """Limit of problems that half of the responses solve, as DA-DLER has it (2000); 0: none."""

    def group_rewards(self, group: Group, state: State) -> list[float]:
        """1 if correct within the limit, which is lower for easy problems."""
        limit = group.limit
        if self.easy_limit > 0 and group.pass_rate >= 0.5:
            limit = min(limit, self.easy_limit)
        return group.within(limit)

    def advantages(self, batch: Sequence[Group], rewards: Values) -> Values:
        """r - mean, then whitened over the batch."""
        lengths = [group.lengths for group in batch]
        return whiten(super().advantages(batch, rewards), lengths, self.whiten)

    def keeps(self, group: Group, rewards: Sequence[float]) -> bool:
        """True if the rewards of the group differ."""
        return min(rewards) < max(rewards)
