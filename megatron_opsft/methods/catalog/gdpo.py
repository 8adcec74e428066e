"""GDPO: correctness and length are normalized in the group each for itself, then added."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from megatron_opsft.methods.advantages import Values, group_normalized, whiten
from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.method import Method, each_group
from megatron_opsft.methods.settings import (
    GroupNormalizedSettings,
    MethodState,
    RunSize,
    check_reached,
)


class GdpoSettings(GroupNormalizedSettings):
    """Its rewards: 1 if correct, and 1 if finished within `target`."""

    name: Literal["gdpo"] = "gdpo"
    target: int = Field(2000, ge=1, description="Tokens within which the length reward is paid.")
    whiten: Literal["none", "responses", "tokens"] = Field(
        "tokens", description="Of the sum, over the batch; TRL: responses, verl: tokens."
    )

    def check(self, run: RunSize) -> None:
        """Errors: as of `PolicySettings`, and for a target that every response meets."""
        super().check(run)
        check_reached("target", self.target, run)


def within(group: Group, settings: GdpoSettings) -> list[float]:
    """1 if finished within the target."""
    return [float(r.finished and r.num_tokens <= settings.target) for r in group.responses]


def gdpo_reward(group: Group, settings: GdpoSettings, state: MethodState) -> list[float]:
    """The sum, which is only reported."""
    scores = within(group, settings)
    return [r.correct + score for r, score in zip(group.responses, scores, strict=True)]


def gdpo_advantage(batch: Sequence[Group], rewards: Values, settings: GdpoSettings) -> Values:
    """whiten(sum over both rewards of (r - mean)/std)."""
    summed = []
    for group in batch:
        correct = [float(response.correct) for response in group.responses]
        both = (correct, within(group, settings))
        parts = [group_normalized(values, settings.std_epsilon) for values in both]
        summed.append([sum(pair) for pair in zip(*parts, strict=True)])
    return whiten(summed, [group.lengths for group in batch], settings.whiten)


GDPO = Method(
    formula="A = whitened over the batch, sum over 1[correct] and 1[n <= Lt] of (r - mean)/std",
    paper="GDPO, arXiv 2601.05242",
    settings=GdpoSettings,
    reward=each_group(gdpo_reward),
    advantage=gdpo_advantage,
)
