"""Methods whose advantages are whitened over the batch: DLER and GDPO."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, NonNegativeInt

from megatron_opsft.methods.advantages import Values, whiten
from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.policy import (
    Beta,
    ClipHigh,
    GroupNormalizedSettings,
    Kl,
    MaxRefills,
    PolicySettings,
)
from megatron_opsft.methods.settings import State


class Dler(PolicySettings):
    """DLER: truncation, an advantage whitened over the batch, and problems drawn again in place of
    groups that teach nothing.

    Its settings are the paper's; the authors' code has `kl` k3 by default.
    """

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
    easy_limit: NonNegativeInt = 0
    """Limit of problems that half of the responses solve, as DA-DLER has it (2000); 0: none."""

    @property
    def has_length(self) -> bool:
        return self.easy_limit > 0 or super().has_length

    def group_rewards(self, group: Group, state: State) -> list[float]:
        """1 if correct within the limit, which is lower for easy problems."""
        limit = group.limit
        if self.easy_limit > 0 and group.pass_rate >= 0.5:
            limit = min(limit, self.easy_limit)
        return group.within(limit)

    def advantages(self, batch: Sequence[Group], rewards: Values) -> Values:
        """r - mean, then whitened over the batch."""
        counts = [group.token_counts for group in batch]
        return whiten(super().advantages(batch, rewards), counts, self.whiten)

    def keeps(self, group: Group, rewards: Sequence[float]) -> bool:
        """True if the rewards of the group differ."""
        return min(rewards) < max(rewards)


class Gdpo(GroupNormalizedSettings):
    """GDPO: normalizes correctness and length in the group, each by itself, then adds them.

    Its two rewards: 1 if correct, and 1 if finished within `target`.
    """

    formula = "A = whitened over the batch, sum over 1[correct] and 1[n <= Lt] of (r - mean)/std"
    paper = "GDPO, arXiv 2601.05242"
    measures_length = True
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
        pairs = zip(group.responses, group.lengths, strict=True)
        return [float(r.finished and length <= self.target) for r, length in pairs]

    def group_rewards(self, group: Group, state: State) -> list[float]:
        """1[correct] + 1[finished within the target]."""
        length_rewards = self.length_rewards(group)
        return [c + n for c, n in zip(group.verdicts, length_rewards, strict=True)]

    def group_advantages(self, group: Group, rewards: list[float]) -> list[float]:
        """The sum over both rewards of (r - mean)/std."""
        length_rewards = self.length_rewards(group)
        # Without the length reward, but with what a run's settings took off (`shaped`).
        verdicts = [r - n for r, n in zip(rewards, length_rewards, strict=True)]
        correctness = super().group_advantages(group, verdicts)
        brevity = super().group_advantages(group, length_rewards)
        return [c + b for c, b in zip(correctness, brevity, strict=True)]

    def advantages(self, batch: Sequence[Group], rewards: Values) -> Values:
        """Whiten the sums over the batch."""
        counts = [group.token_counts for group in batch]
        return whiten(super().advantages(batch, rewards), counts, self.whiten)
