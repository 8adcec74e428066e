"""SmartThinker: correct responses pay for length beyond that of best accuracy, never so much that
their advantage becomes negative.
"""

from statistics import fmean, pvariance
from typing import Literal

from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.settings import GroupNormalizedSettings, State


class SmartThinker(GroupNormalizedSettings):
    """SmartThinker."""

    formula = "r = 1[correct] - a (n - l*)+ of correct ones, a such that their A >= 0"
    paper = "SmartThinker, arXiv 2603.08000"
    name: Literal["smart_thinker"] = "smart_thinker"

    def group_rewards(self, group: Group, state: State) -> list[float]:
        """c - a d, d = (n - l*)+ of correct ones; a leaves the longest of them the mean reward."""
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
    """Where correct responses are densest among all, both taken as normally distributed: l* =
    (v_c m - v m_c)/(v_c - v), within the group's lengths. The shortest where that is no peak.
    """
    lengths, correct = group.lengths, group.correct_lengths
    variance, of_correct = pvariance(lengths), pvariance(correct)
    if of_correct >= variance:
        return min(lengths)
    mean, mean_correct = fmean(lengths), fmean(correct)
    peak = (of_correct * mean - variance * mean_correct) / (of_correct - variance)
    return min(max(peak, min(lengths)), max(lengths))
