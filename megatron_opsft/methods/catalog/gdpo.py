"""GDPO: correctness and length are normalized in the group each for itself, then added."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from megatron_opsft.methods.advantages import Values, group_normalized, whiten
from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.settings import GroupNormalizedSettings, State


class Gdpo(GroupNormalizedSettings):
    """Its rewards: 1 if correct, and 1 if finished within `target`."""

    formula = "A = whitened over the batch, sum over 1[correct] and 1[n <= Lt] of (r - mean)/std"
    paper = "GDPO, arXiv 2601.05242"
    per_token = {"target": 1}
    fits_from = 2001
    missable = "target"
    name: Literal["gdpo"] = "gdpo"
    target: int = Field(2000, ge=1)
    """Tokens within which the length reward is paid."""
    whiten: Literal["none", "responses", "tokens"] = "tokens"
    """How the sum is whitened over the batch; TRL: responses, verl: tokens."""

    def length_rewards(self, group: Group) -> list[float]:
        """1 if finished within the target."""
        return [
            float(r.finished and r.num_tokens <= self.target) for r in group.responses
        ]

    def group_rewards(self, group: Group, state: State) -> list[float]:
        """The sum of both."""
        scores = self.length_rewards(group)
        return [c + score for c, score in zip(group.verdicts, scores, strict=True)]

    def advantages(self, batch: Sequence[Group], rewards: Values) -> Values:
        """whiten(sum over both rewards of (r - mean)/std)."""
        summed = []
        for group, reward in zip(batch, rewards, strict=True):
            scores = self.length_rewards(group)
            both = (
                [r - score for r, score in zip(reward, scores, strict=True)],
                scores,
            )
            parts = [group_normalized(values, self.std_epsilon) for values in both]
            summed.append([sum(pair) for pair in zip(*parts, strict=True)])
        return whiten(summed, [group.lengths for group in batch], self.whiten)
