"""SmartThinker: correct responses pay for tokens beyond the length of best accuracy, but never so
much that their advantage becomes negative.
"""

from statistics import fmean, pvariance
from typing import Literal

from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.policy import GroupNormalizedSettings
from megatron_opsft.methods.settings import State


class SmartThinker(GroupNormalizedSettings):
    """SmartThinker's settings."""

    formula = "r = 1[correct] - a (n - l*)+ of correct ones, a such that their A >= 0"
    paper = "SmartThinker, arXiv 2603.08000"
    name: Literal["smart_thinker"] = "smart_thinker"

    def group_rewards(self, group: Group, state: State) -> list[float]:
        """c - a d with d = (n - l*)+ for correct responses; a makes the longest of them earn the
        mean reward.
        """
        rewards = group.verdicts
        if not 0 < group.pass_rate < 1:
            return rewards
        best = best_length(group)
        beyond = [max(r.num_tokens - best, 0.0) * r.correct for r in group.responses]
        if not any(beyond):
            return rewards
        price = (1 - group.pass_rate) / (max(beyond) - fmean(beyond))
        return [
            reward - price * tokens
            for reward, tokens in zip(rewards, beyond, strict=True)
        ]


def best_length(group: Group) -> float:
    """The length l* at which the share of correct responses is largest.

    All lengths and the correct ones (mean m, m_c; variance v, v_c) are taken as normally
    distributed: l* = (v_c m - v m_c)/(v_c - v), clipped to the group's lengths. It is the shortest
    length if that ratio of densities has no peak.
    """
    lengths, correct = group.lengths, group.correct_lengths
    v, v_c = pvariance(lengths), pvariance(correct)
    if v_c >= v:
        return min(lengths)
    peak = (v_c * fmean(lengths) - v * fmean(correct)) / (v_c - v)
    return min(max(peak, min(lengths)), max(lengths))
