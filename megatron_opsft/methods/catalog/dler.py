"""DLER: truncation, an advantage whitened over the batch, and problems drawn again in place of
groups that teach nothing.
"""

from collections.abc import Sequence
from typing import Literal

from megatron_opsft.methods.advantages import Values, whiten
from megatron_opsft.methods.dapo import MaxRefills
from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.settings import Beta, ClipHigh, Kl, PolicySettings, State


class Dler(PolicySettings):
    """As in the paper; the code's KL is k3 by default."""

    formula = "r = 1[correct and n <= L]; A = whitened over the batch (r - mean)"
    paper = "DLER, arXiv 2510.15110"
    name: Literal["dler"] = "dler"
    clip_high: ClipHigh = 0.28
    beta: Beta = 0.0005
    kl: Kl = "k2"
    whiten: Literal["responses", "tokens"] = "tokens"
    """Whether a response counts once, or once for each token (the authors' code)."""
    max_refills: MaxRefills = 8

    def group_rewards(self, group: Group, state: State) -> list[float]:
        """1 if correct within the limit."""
        return group.within(group.limit)

    def advantages(self, batch: Sequence[Group], rewards: Values) -> Values:
        """r - mean, then whitened over the batch."""
        lengths = [group.lengths for group in batch]
        return whiten(super().advantages(batch, rewards), lengths, self.whiten)

    def keeps(self, group: Group, rewards: Sequence[float]) -> bool:
        """Whether neither all nor none of the responses are rewarded."""
        return min(rewards) < max(rewards)
