"""Mastery-gated length penalty: only where every response to the problem is correct."""

from statistics import median
from typing import Literal

from pydantic import Field

from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.method import Method, each_group
from megatron_opsft.methods.settings import GroupNormalizedSettings, MethodState


class MasteryGatedSettings(GroupNormalizedSettings):
    """The weight is not known."""

    name: Literal["mastery_gated"] = "mastery_gated"
    weight: float = Field(1.0, ge=0, description="Of the length penalty.")


def gated_reward(group: Group, settings: MasteryGatedSettings, state: MethodState) -> list[float]:
    """c - w (n - median)/(max - median) beyond the median, if all are correct."""
    if group.pass_rate < 1:
        return [float(response.correct) for response in group.responses]
    middle, longest = median(group.lengths), max(group.lengths)
    return [
        1 - settings.weight * (n - middle) / (longest - middle) if n > middle else 1.0
        for n in group.lengths
    ]


MASTERY_GATED = Method(
    formula="all correct: r = 1 - w (n - median)+/(max - median), else 1[correct]",
    paper="CoT Compression with One-Domain-to-All Generalization, arXiv 2601.06052",
    settings=MasteryGatedSettings,
    reward=each_group(gated_reward),
)
