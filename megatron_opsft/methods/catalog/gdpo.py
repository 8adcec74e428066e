"""GDPO: normalizes correctness and length in the group, each by itself, then adds them."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from megatron_opsft.methods.advantages import Values, whiten
from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.policy import GroupNormalizedSettings
from megatron_opsft.methods.settings import State


class Gdpo(GroupNormalizedSettings):
    """GDPO's settings. Its two rewards: 1 if correct, and 1 if finished within `target`."""

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
        """1[correct] + 1[finished within the target]."""
        length_rewards = self.length_rewards(group)
        return [c + n for c, n in zip(group.verdicts, length_rewards, strict=True)]

    def group_advantages(self, group: Group, rewards: list[float]) -> list[float]:
        """The sum over both rewards of (r - mean)/std."""
        length_rewards = self.length_rewards(group)
        verdicts = [r - n for r, n in zip(rewards, length_rewards, strict=True)]
        correctness = super().group_advantages(group, verdicts)
        brevity = super().group_advantages(group, length_rewards)
        return [c + b for c, b in zip(correctness, brevity, strict=True)]

    def advantages(self, batch: Sequence[Group], rewards: Values) -> Values:
        """Whiten the sums over the batch."""
        lengths = [group.lengths for group in batch]
        return whiten(super().advantages(batch, rewards), lengths, self.whiten)
