"""DDCA: an advantage of length among the correct responses alone, as strong as the pass rate."""

from collections.abc import Sequence
from statistics import fmean
from typing import Literal

from pydantic import Field

from megatron_opsft.methods.advantages import Values
from megatron_opsft.methods.catalog.er_rl import sigmoid_of_length
from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.method import Method, each_group, normalized
from megatron_opsft.methods.rewards import verdict
from megatron_opsft.methods.settings import GroupNormalizedSettings


class DdcaSettings(GroupNormalizedSettings):
    """DDCA."""

    name: Literal["ddca"] = "ddca"
    length_weight: float = Field(0.2, ge=0, description="Of the advantage of length.")


def ddca_advantage(batch: Sequence[Group], rewards: Values, settings: DdcaSettings) -> Values:
    """(r - mean)/std - w pass_rate (s - mean s), s = sigma((n - mu)/std), both of correct ones."""
    advantages = normalized(batch, rewards, settings)
    for group, values in zip(batch, advantages, strict=True):
        correct = [i for i, response in enumerate(group.responses) if response.correct]
        scores = sigmoid_of_length(group, group.correct_lengths) if correct else []
        for i, score in zip(correct, scores, strict=True):
            values[i] -= settings.length_weight * group.pass_rate * (score - fmean(scores))
    return advantages


DDCA = Method(
    formula="A = (r - mean)/std - 0.2 pass_rate (s - mean s) if correct, s = sigma((n - mu)/std)",
    paper="DDCA, arXiv 2602.02099",
    settings=DdcaSettings,
    reward=each_group(verdict),
    advantage=ddca_advantage,
)
