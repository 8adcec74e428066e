"""Kimi k1.5's length penalty, and its update with a squared log-ratio."""

from typing import Literal

from pydantic import Field

from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.method import Method, centered, each_group
from megatron_opsft.methods.objective import SquaredLogRatio, Surrogate
from megatron_opsft.methods.settings import AggregationKey, MethodState, PolicySettings


class KimiSettings(PolicySettings):
    """The report gives neither weight nor tau nor warm-up."""

    name: Literal["kimi"] = "kimi"
    aggregation: AggregationKey = "sequence_sum"
    weight: float = Field(1.0, ge=0, description="Of the length reward.")
    warmup_steps: int = Field(0, ge=0, description="Steps without the length reward.")
    loss: Literal["squared_log_ratio", "token_clip"] = Field(
        "squared_log_ratio",
        description="squared_log_ratio: A log p - tau/2 (log p/old)^2 of whole responses.",
    )
    tau: float = Field(0.1, ge=0, description="Of squared_log_ratio; nothing in the first update.")

    @property
    def surrogate(self) -> Surrogate:
        if self.loss == "token_clip" or self.updates_per_batch == 1:
            return super().surrogate
        return SquaredLogRatio(tau=self.tau)


def kimi_reward(group: Group, settings: KimiSettings, state: MethodState) -> list[float]:
    """c + w x, x = 1/2 - (n - min)/(max - min); of a wrong one at most 0."""
    rewards = [float(response.correct) for response in group.responses]
    shortest, longest = min(group.lengths), max(group.lengths)
    if state.step <= settings.warmup_steps or shortest == longest:
        return rewards
    scores = [0.5 - (length - shortest) / (longest - shortest) for length in group.lengths]
    return [
        reward + settings.weight * (score if reward else min(0.0, score))
        for reward, score in zip(rewards, scores, strict=True)
    ]


KIMI = Method(
    formula="r = 1[correct] + w (1/2 - (n - min)/(max - min)), of wrong ones <= 0; A = r - mean",
    paper="Kimi k1.5, arXiv 2501.12599",
    settings=KimiSettings,
    reward=each_group(kimi_reward),
    advantage=centered,
)
